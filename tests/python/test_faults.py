"""Ranks that disagree, are killed, stopped, or leave: an error on every other rank, in time."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from worlds import try_ranks

import ringspan
import ringspan.torch as rt


def _tensors(rank, ranks, n=64, dim=16, heads=4, dtype=torch.float32):
    rows = rt.Sharding("zigzag", tokens=n, ranks=ranks).rows(rank)
    return tuple(torch.ones(1, rows, heads, dim, dtype=dtype) for _ in range(3))


def _disagree(rank, ranks, what):
    q, k, v = _tensors(rank, ranks)
    group = dist.group.WORLD
    rt.attention(q, k, v, group=group)
    odd = rank == ranks - 1
    begin = time.monotonic()
    options = {}
    if what == "head_dim" and odd:
        q, k = q[..., :8], k[..., :8]
    elif what == "dtype" and odd:
        q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    elif what == "pattern":
        options["causal"] = odd
    elif what == "cu_seqlens":
        options["cu_seqlens"] = [0, 10, 64] if odd else [0, 11, 64]
    elif what == "strategy":
        options["strategy"] = "ring" if odd else "exchange"
    elif what == "invalid" and odd:
        k = k[:, :, :3]
    elif what == "unknown" and odd:
        options["attn_mask"] = None
    elif what == "tokens" and odd:
        q, k, v = (torch.cat([t, t], 1) for t in (q, k, v))
    elif what == "gradient" and odd:
        q.requires_grad_()
    error = None
    try:
        rt.attention(q, k, v, group=group, deadline=20.0, **options)
    except ringspan.Error as e:
        error = (type(e).__name__, str(e))
    seconds = time.monotonic() - begin
    q, k, v = _tensors(rank, ranks)
    after = rt.attention(q, k, v, group=group)  # a disagreement leaves the group usable
    return error, seconds, after.shape[1]


@pytest.mark.parametrize(
    "what, named",
    [
        ("head_dim", "head_dim: 16 on rank 0, 8 on rank 2"),
        ("dtype", "dtype"),
        ("pattern", "pattern"),
        ("cu_seqlens", "cu_seqlens"),
        ("strategy", "strategy"),
        ("invalid", "v.heads (4) must equal k.heads (3)"),
        ("unknown", "attn_mask"),
        ("tokens", "sharding 'zigzag' deals"),
        ("gradient", "whether gradients are needed"),
    ],
)
def test_ranks_that_disagree_raise_on_every_rank(what, named):
    for rank, (kind, value) in enumerate(try_ranks(3, _disagree, what)):
        assert kind == "value", f"rank {rank}: {value}"
        error, seconds, rows = value
        assert error is not None, f"rank {rank} raised nothing"
        assert named in error[1], f"rank {rank}: {error}"
        assert seconds < 15.0
        assert rows > 0


def _calls(rank, ranks):
    q, k, v = _tensors(rank, ranks)
    if rank == 0:
        rt.attention(q, k, v, group=dist.new_group([0]))  # another group counts for itself
    else:
        dist.new_group([0])
    if rank == 1:
        transport = __import__("ringspan.torch._execute", fromlist=["x"]).group_named(dist.group.WORLD.group_name)
        transport._calls += 1
    return rt.attention(q, k, v, group=dist.group.WORLD, deadline=20.0)


def test_the_number_of_calls_is_compared():
    for kind, value in try_ranks(2, _calls):
        assert kind == "error" and value[0] == "CommError" and "number of calls" in value[1], value


def _one_leaves(rank, ranks):
    q, k, v = _tensors(rank, ranks)
    rt.attention(q, k, v, group=dist.group.WORLD)
    if rank == 1:
        os._exit(0)
    begin = time.monotonic()
    try:
        rt.attention(q, k, v, group=dist.group.WORLD, deadline=10.0)
    except ringspan.CommError as error:
        return str(error), time.monotonic() - begin
    return None, 0.0


def _one_gets(rank, ranks, number, deadline):
    """Rank 1 gets a signal while it is in the middle of its work; the others call again and again."""
    q, k, v = _tensors(rank, ranks, n=1024)
    q.requires_grad_()
    rt.attention(q, k, v, group=dist.group.WORLD, causal=True)
    begin = time.monotonic()
    try:
        for step in range(10**6):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), number)
            begin = time.monotonic()
            rt.attention(q, k, v, group=dist.group.WORLD, causal=True, deadline=deadline).sum().backward()
    except ringspan.CommError as error:
        seconds = time.monotonic() - begin
        try:
            rt.attention(q, k, v, group=dist.group.WORLD)
        except ringspan.CommError as again:  # stays failed, at once
            return str(error), seconds, str(again), time.monotonic() - begin - seconds
    return None


def _expect(outcomes, ranks, missing, limit):
    for rank in range(ranks):
        if rank in missing:
            continue
        kind, value = outcomes[rank]
        assert kind == "value" and value is not None, f"rank {rank}: {kind} {value}"
        text, seconds = value[:2]
        assert text.startswith(f"rank {rank}/{ranks}: "), text
        assert seconds < limit, f"rank {rank} took {seconds:.1f} s: {text}"
        if len(value) > 2:
            assert value[2] and value[3] < 2.0
    return [value for _, value in outcomes]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_exits_is_missed(ranks):
    _expect(try_ranks(ranks, _one_leaves, missing=[1]), ranks, [1], 8.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_fails_the_others_at_once(ranks):
    _expect(try_ranks(ranks, _one_gets, signal.SIGKILL, 20.0, missing=[1]), ranks, [1], 10.0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stopped_rank_fails_the_others_at_the_deadline(ranks):
    values = _expect(try_ranks(ranks, _one_gets, signal.SIGSTOP, 3.0, missing=[1]), ranks, [1], 9.0)
    assert any(value and "no sign of life" in value[0] for value in values)


def _first_stopped(rank, ranks):
    """Rank 0 holds the store through which ranks hear of each other."""
    q, k, v = _tensors(rank, ranks)
    rt.attention(q, k, v, group=dist.group.WORLD)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    begin = time.monotonic()
    try:
        rt.attention(q, k, v, group=dist.group.WORLD, deadline=3.0)
    except ringspan.CommError as error:
        return str(error), time.monotonic() - begin
    return None


def test_a_stopped_rank_that_holds_the_store():
    outcomes = try_ranks(3, _first_stopped, missing=[0])
    _expect(outcomes, 3, [0], 10.0)


def _slow(rank, ranks):
    """Rank 1 computes for longer than the deadline of rank 0, which waits for it."""
    n = 6000
    kind = "explicit:0-9;10-5999"  # rank 0 has nothing to do
    sharding = rt.Sharding(kind, tokens=n, ranks=ranks)
    q = torch.ones(1, sharding.rows(rank), 8, 64)
    for _ in range(3):
        begin = time.monotonic()
        rt.attention(q, q, q, group=dist.group.WORLD, sharding=sharding, strategy="exchange", deadline=0.6)
        seconds = time.monotonic() - begin
    return seconds


def test_a_rank_that_computes_is_waited_for():
    outcomes = try_ranks(2, _slow)
    assert all(kind == "value" for kind, _ in outcomes), outcomes


def _interrupted(rank, ranks):
    import threading

    q, k, v = _tensors(rank, ranks)
    rt.attention(q, k, v, group=dist.group.WORLD)
    begin = time.monotonic()
    if rank == 0:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(2.0)
    try:
        rt.attention(q, k, v, group=dist.group.WORLD, deadline=30.0)
    except (KeyboardInterrupt, ringspan.CommError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None


def test_ctrl_c_ends_the_waiting():
    (_, first), (_, second) = try_ranks(2, _interrupted)
    assert first is not None and first[0] == "KeyboardInterrupt" and first[2] < 5.0, first
    assert second is not None and second[0] == "CommError" and second[2] < 10.0, second
