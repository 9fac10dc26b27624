"""Ranks that disagree, are killed, stopped, or leave: an error on every other rank.

What shows at once says what it is, and what shows at the deadline says so: no test goes by how long it took.
"""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from worlds import try_ranks

import ringspan
import ringspan.torch as rt
from ringspan.torch import _transport


def _tensors(rank, ranks, n=64, dim=16, heads=4, dtype=torch.float32):
    rows = rt.Sharding("zigzag", tokens=n, ranks=ranks).rows(rank)
    return tuple(torch.ones(1, rows, heads, dim, dtype=dtype) for _ in range(3))


def _disagree(rank, ranks, what):
    q, k, v = _tensors(rank, ranks)
    group = dist.group.WORLD
    rt.attention(q, k, v, group=group)
    odd = rank == ranks - 1
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
        rt.attention(q, k, v, group=group, **options)
    except ringspan.Error as e:
        error = (type(e).__name__, str(e))
    q, k, v = _tensors(rank, ranks)
    after = rt.attention(q, k, v, group=group)  # a disagreement leaves the group usable
    return error, after.shape[1]


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
        error, rows = value
        assert error is not None, f"rank {rank} raised nothing"
        assert named in error[1], f"rank {rank}: {error}"
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
    return rt.attention(q, k, v, group=dist.group.WORLD)


def test_the_number_of_calls_is_compared():
    for kind, value in try_ranks(2, _calls):
        assert kind == "error" and value[0] == "CommError" and "number of calls" in value[1], value


def _one_leaves(rank, ranks):
    q, k, v = _tensors(rank, ranks)
    rt.attention(q, k, v, group=dist.group.WORLD)
    if rank == 1:
        os._exit(0)
    try:
        rt.attention(q, k, v, group=dist.group.WORLD)
    except ringspan.CommError as error:
        return str(error)
    return None


def _one_gets(rank, ranks, number, deadline):
    """Rank 1 gets a signal while it is in the middle of its work; the others call again and again."""
    q, k, v = _tensors(rank, ranks, n=1024)
    q.requires_grad_()
    rt.attention(q, k, v, group=dist.group.WORLD, causal=True)
    try:
        for step in range(10**6):
            if rank == 1 and step == 3:
                os.kill(os.getpid(), number)
            rt.attention(q, k, v, group=dist.group.WORLD, causal=True, deadline=deadline).sum().backward()
    except ringspan.CommError as error:
        try:
            rt.attention(q, k, v, group=dist.group.WORLD)
        except ringspan.CommError as again:
            assert str(again) == str(error)  # stays failed: the deadline is not waited for again
            return str(error)
    return None


def _texts(outcomes, missing):
    """The errors of the ranks that are left."""
    ranks = len(outcomes)
    texts = []
    for rank, (kind, text) in enumerate(outcomes):
        if rank == missing:
            continue
        assert kind == "value" and text is not None, f"rank {rank}: {kind} {text}"
        assert text.startswith(f"rank {rank}/{ranks}: "), text
        texts.append(text)
    return texts


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_exits_is_missed(ranks):
    assert "no sign of life" not in "".join(_texts(try_ranks(ranks, _one_leaves, missing=[1]), 1))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_fails_the_others_at_once(ranks):
    assert "no sign of life" not in "".join(_texts(try_ranks(ranks, _one_gets, signal.SIGKILL, 60.0, missing=[1]), 1))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_stopped_rank_fails_the_others_at_the_deadline(ranks):
    assert "no sign of life" in "".join(_texts(try_ranks(ranks, _one_gets, signal.SIGSTOP, 3.0, missing=[1]), 1))


def _first_stopped(rank, ranks):
    """Rank 0 holds the store through which ranks hear of each other."""
    q, k, v = _tensors(rank, ranks)
    rt.attention(q, k, v, group=dist.group.WORLD)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        rt.attention(q, k, v, group=dist.group.WORLD, deadline=3.0)
    except ringspan.CommError as error:
        return str(error)
    return None


def test_a_stopped_rank_that_holds_the_store():
    assert "no sign of life" in "".join(_texts(try_ranks(3, _first_stopped, missing=[0]), 0))


def _slow(rank, ranks, n, deadline):
    """Rank 1 computes while rank 0, which has next to nothing to do, waits for it; returns how long that was at most."""
    sharding = rt.Sharding(f"explicit:0-9;10-{n - 1}", tokens=n, ranks=ranks)
    q = torch.ones(1, sharding.rows(rank), 8, 64)
    longest = 0.0
    for _ in range(3):
        begin = time.monotonic()
        rt.attention(q, q, q, group=dist.group.WORLD, sharding=sharding, strategy="exchange", deadline=deadline)
        longest = max(longest, time.monotonic() - begin)
    return longest


def test_a_rank_that_computes_is_waited_for():
    """Another deadline, and more to do, where rank 1 was done before it, or where the machine kept rank 1 from showing life."""
    n, deadline = 6000, 0.6
    for _ in range(4):
        outcomes = try_ranks(2, _slow, n, deadline)
        if any(kind != "value" for kind, _ in outcomes):
            n, deadline = 2 * n, 4 * deadline
        elif outcomes[0][1] < deadline:
            n *= 2
        else:
            return
    pytest.fail(str(outcomes))


def _interrupted(rank, ranks):
    q, k, v = _tensors(rank, ranks)
    group = dist.group.WORLD
    rt.attention(q, k, v, group=group)
    store = dist.distributed_c10d._get_default_store()
    core = _transport.transport_of(group.group_name).core

    def interrupt():
        while not core.outstanding_peers():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    if rank == 1:
        store.wait(["interrupted"])
    try:
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it
            threading.Thread(target=interrupt).start()
        rt.attention(q, k, v, group=group)
    except (KeyboardInterrupt, ringspan.CommError) as error:
        store.set("interrupted", "")
        return type(error).__name__, str(error)
    return None


def test_ctrl_c_ends_the_waiting():
    (_, first), (_, second) = try_ranks(2, _interrupted)
    assert first is not None and first[0] == "KeyboardInterrupt", first
    assert second is not None and second[0] == "CommError" and "no sign of life" not in second[1], second
