"""Ranks that disagree, are killed, stopped, or leave: an error on every other rank.

What shows at once says what it is, and what shows at the deadline says so: no test goes by how long it took.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
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
        ("dtype", "dtype: float32 on rank 0, bfloat16 on rank 2"),
        ("pattern", "pattern"),
        ("cu_seqlens", "cu_seqlens"),
        ("strategy", "strategy"),
        ("invalid", "v.heads (4) must equal k.heads (3)"),
        ("unknown", "attn_mask"),
        ("tokens", "sharding 'zigzag' deals"),
        ("gradient", "whether gradients are needed: False on rank 0, True on rank 2"),
    ],
)
def test_ranks_that_disagree_raise_on_every_rank(what, named):
    for rank, (kind, value) in enumerate(try_ranks(3, _disagree, what)):
        assert kind == "value", f"rank {rank}: {value}"
        error, rows = value
        assert error is not None, f"rank {rank} raised nothing"
        assert named in error[1], f"rank {rank}: {error}"
        assert rows > 0


_OPTIONS = dict(
    pattern=("causal", "full"), lengths=([10], [11]), scale=(0.5, 0.25), softcap=(1.5, 2.0), dropout_p=(0.1, 0.2), strategy=("ring", "exchange"),
    cu_seqlens=([0, 9, 64], None), sharding=("zigzag", rt.Sharding("zigzag", tokens=64, ranks=3)), dropout_seed=(2**64 - 1, 7),
)  # fmt: skip


def _texts_differ(rank, ranks):
    q, k, v = _tensors(rank, ranks)
    errors = []
    for name, (usual, odd) in _OPTIONS.items():
        with pytest.raises(ringspan.CommError) as caught:
            options = dict(dropout_p=0.1) if name == "dropout_seed" else {}
            rt.attention(q, k, v, group=dist.group.WORLD, **options, **{name: odd if rank == 2 else usual})
        errors.append(str(caught.value).split("ranks disagree on ")[1])
    with pytest.raises(ringspan.CommError, match=r"cu_seqlens: .* \.\.\. on rank 0, .* \.\.\. on rank 2 \(they differ after these 196 characters\)"):
        rt.attention(q, k, v, group=dist.group.WORLD, cu_seqlens=[*range(60), 61 if rank == 2 else 62, 64])
    with pytest.raises(ringspan.CommError, match="dropout_seed: (7 on rank 0, none on rank 1|none on rank 1, 7 on rank 0)"):
        rt.attention(q, k, v, group=dist.group.WORLD, dropout_p=0.1, dropout_seed=None if rank == 1 else 7)
    rt.attention(q, k, v, group=dist.group.WORLD, dropout_p=0.0, dropout_seed=rank)  # nothing is dropped
    return errors


def test_a_disagreement_shows_the_values():
    first, *others = [value for _, value in try_ranks(3, _texts_differ)]
    assert all(errors == first for errors in others)
    assert first == [
        "pattern, causal or window: causal on rank 0, full on rank 2",
        "lengths: [10] on rank 0, [11] on rank 2",
        "scale: 0.5 on rank 0, 0.25 on rank 2",
        "softcap: 1.5 on rank 0, 2.0 on rank 2",
        "dropout_p: 0.1 on rank 0, 0.2 on rank 2",
        "strategy: ring on rank 0, exchange on rank 2",
        "pattern, causal or window: documents on rank 0, full on rank 2",
        "sharding of queries: zigzag on rank 0, zigzag of 64 tokens over 3 ranks on rank 2",
        "dropout_seed: 18446744073709551615 on rank 0, 7 on rank 2",
    ]


class _Strange(str):
    def __contains__(self, _):
        raise ZeroDivisionError("strange")


_MISTAKES = [
    (dict(lengths=64), ringspan.InvalidArgument, "lengths (64)"),
    (dict(memory_budget="4GB"), ringspan.InvalidArgument, "memory_budget ('4GB')"),
    (dict(pattern="causal|full"), ringspan.InvalidArgument, "pattern ('causal|full')"),
    (dict(dropout_p=0.1, dropout_seed="a"), ringspan.InvalidArgument, "dropout_seed ('a')"),
    (dict(alibi_slopes=torch.ones(4, requires_grad=True)), ringspan.Unsupported, "alibi_slopes"),
    (dict(attn_mask=None), ringspan.UnknownArgument, "give pattern="),
    (dict(foo=1), TypeError, "no argument 'foo'"),
    (dict(pattern=_Strange("causal")), ZeroDivisionError, "strange"),
]


def _mistaken(rank, ranks):
    """One rank's mistake in one step, which it catches: the next steps are in step again."""
    torch.manual_seed(0)
    sharding = rt.Sharding("zigzag", tokens=64, ranks=ranks)
    wholes = [torch.randn(1, 64, 4, 16) for _ in range(2)]
    for options, kind, text in _MISTAKES:
        local = sharding.shard(wholes[0], rank=rank)
        with pytest.raises(Exception) as caught:
            rt.attention(local, local, local, causal=True, group=dist.group.WORLD, **(options if rank == 1 else {}))
        assert text in str(caught.value), str(caught.value)
        if rank == 1:
            assert isinstance(caught.value, kind), repr(caught.value)
        else:
            assert isinstance(caught.value, ringspan.Error) and "on rank 1: " in str(caught.value), repr(caught.value)
        for whole in wholes:
            local = sharding.shard(whole, rank=rank)
            o = rt.attention(local, local, local, causal=True, group=dist.group.WORLD)
            expected = sharding.shard(rt.attention(whole, whole, whole, causal=True), rank=rank)
            assert (o - expected).abs().max() < 1e-5, options
    return True


def test_a_mistake_of_one_rank_leaves_all_in_step():
    for kind, value in try_ranks(3, _mistaken):
        assert kind == "value", value[2]


def _fails_inside(rank, ranks):
    """What goes wrong in the op itself, before ranks talk: no memory, for instance."""
    from ringspan.torch import _execute

    q, k, v = _tensors(rank, ranks)
    q.requires_grad_()
    o = rt.attention(q, k, v, group=dist.group.WORLD)
    original = _execute.Call
    errors = []
    for run in (lambda: rt.attention(q, k, v, group=dist.group.WORLD), lambda: o.sum().backward(retain_graph=True)):
        if rank == 1:
            _execute.Call = lambda *_: [][1]
        with pytest.raises(Exception) as caught:
            run()
        _execute.Call = original
        errors.append((type(caught.value).__name__, str(caught.value)))
    o.sum().backward()
    return errors


def test_an_error_inside_of_the_op_is_that_of_all():
    (kind, first), (_, second) = try_ranks(2, _fails_inside)
    assert kind == "value", first
    assert first == [("Error", "rank 0/2: on rank 1: IndexError: list index out of range")] * 2
    assert second == [("IndexError", "list index out of range")] * 2


def _compiled(rank, ranks):
    """Where a graph breaks at the error of one rank."""
    sharding = rt.Sharding("zigzag", tokens=64, ranks=ranks)
    function = torch.compile(lambda q, k: rt.attention(q, k, k, group=dist.group.WORLD, sharding=sharding), backend="aot_eager")
    q, k, _ = _tensors(rank, ranks)
    with pytest.raises(ringspan.InvalidArgument, match="multiple of k.heads .3."):
        function(q, k[:, :, :3] if rank == 1 else k)
    return function(q, k).shape[1]


def test_a_mistake_of_one_rank_in_a_compiled_call():
    for kind, value in try_ranks(2, _compiled):
        assert kind == "value", value[2]


def _other_order(rank, ranks):
    torch.manual_seed(0)
    sharding = rt.Sharding("zigzag", tokens=64, ranks=ranks)
    x = torch.randn(1, 64, 2, 16)
    local = sharding.shard(x, rank=rank).requires_grad_()
    layers = [rt.attention(local, local, local, causal=True, group=dist.group.WORLD) for _ in range(2)]
    if rank == 1:
        layers.reverse()
    with pytest.raises(ringspan.CommError, match="the call of forward that backward belongs to: 1 on rank 0, 2 on rank 1"):
        layers[0].sum().backward()
    layers.sort(key=lambda o: o.grad_fn._sequence_nr())
    for o in layers:  # the graph is still there: nothing was computed
        o.sum().backward()
    whole = x.clone().requires_grad_()
    (2 * rt.attention(whole, whole, whole, causal=True)).sum().backward()
    assert (local.grad - sharding.shard(whole.grad, rank=rank)).abs().max() < 1e-4


def test_backwards_in_another_order_are_refused():
    for kind, value in try_ranks(2, _other_order):
        assert kind == "value", value[2]


def _calls(rank, ranks):
    q, k, v = _tensors(rank, ranks)
    if rank == 0:
        rt.attention(q, k, v, group=dist.new_group([0]))  # another group counts for itself
    else:
        dist.new_group([0])
    if rank == 1:
        transport = __import__("ringspan.torch._sessions", fromlist=["x"]).group_named(dist.group.WORLD.group_name)
        transport._calls += 1
    return rt.attention(q, k, v, group=dist.group.WORLD)


def test_the_number_of_calls_is_compared():
    for kind, value in try_ranks(2, _calls):
        assert kind == "error" and value[0] == "CommError" and "number of calls" in value[1], value


_ONE_CALL_MORE = """
import time, torch, torch.distributed as dist, ringspan
from ringspan.torch import attention
dist.init_process_group("gloo")
x = torch.ones(1, 32, 2, 8)
attention(x, x, x, group=dist.group.WORLD)
try:
    if dist.get_rank() == 0:
        attention(x, x, x, group=dist.group.WORLD, deadline=1.0)
    else:
        time.sleep(3)
except ringspan.CommError as error:
    print(error)
dist.destroy_process_group()
"""


def test_a_process_ends_well_after_a_deadline():
    """Threads that wait for another rank's messages are at their end before the interpreter is: torch would abort the process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    processes = []
    try:
        for rank in range(2):
            environment = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1")
            processes.append(subprocess.Popen([sys.executable, "-c", _ONE_CALL_MORE], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
        texts = [process.communicate(timeout=120)[0].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], texts
    assert "no sign of life" in texts[0], texts


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


def _late(rank, ranks):
    """Rank 1 comes when rank 0 has given up, whose greeting gloo still has: (its error, how many of its blocks were written since)."""
    store = dist.distributed_c10d._get_default_store()
    q, k, v = _tensors(rank, ranks)
    error, blocks = None, []
    if rank == 1:
        store.wait(["given up"])
    try:
        rt.attention(q, k, v, group=dist.group.WORLD, deadline=1.0 if rank == 0 else 60.0)
    except ringspan.CommError as raised:
        error = str(raised)
    if rank == 0:
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        for size in (64, 128, 256) * 1000:  # what is free now may be what the messages were in
            blocks.append((libc.malloc(ctypes.c_size_t(size)), size))
            ctypes.memset(blocks[-1][0], 0xAB, size)
        store.set("given up", "")
        store.wait(["came"])
    else:
        store.set("came", "")
    return error, sum(ctypes.string_at(at, size) != bytes([0xAB]) * size for at, size in blocks)


def test_buffers_of_a_greeting_that_failed_are_not_touched_later():
    (_, (first, written)), (_, (second, _)) = try_ranks(2, _late)
    assert "no sign of life" in first and "rank 0 failed: " in second and "different versions" not in second
    assert written == 0


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


_FORKED = """
import multiprocessing, sys
import torch
import ringspan.torch as rt

torch.set_num_threads(2)
def calls():
    torch.manual_seed(0)
    results = []
    for n in (300, 301, 302, 303, 304, 305):  # more than the sessions that are kept
        x = torch.randn(1, n, 4, 16)
        results += [rt.attention(x, x, x, causal=True), rt.attention(x, x, x, causal=True, ranks=2)]
    return results

def same():
    sys.exit(0 if all(map(torch.equal, calls(), expected)) else 3)

expected = calls()
context = multiprocessing.get_context("fork")
for work in (same, lambda: None):
    child = context.Process(target=work)
    child.start()
    child.join(60)
    code = child.exitcode
    if code != 0:
        child.kill()
        sys.exit(f"the child's exit code is {code}")
assert all(map(torch.equal, calls(), expected))
"""


def test_a_forked_process_computes_and_ends():
    """Like the workers of a DataLoader, after attention in the parent: the threads of its sessions are not in the child."""
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
