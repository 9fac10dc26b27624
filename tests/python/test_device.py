"""ringspan.torch.attention on a device: the emulated one, whose memory is tensors of the CPU, or what RINGSPAN_TEST_DEVICE names
("cuda:0"). All but its streams is what CUDA tensors go through."""

import contextlib
import ctypes
import os
import shutil
import subprocess
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reference import assert_close, attention, dilated_counts, mask_of
from worlds import run_ranks

import ringspan
import ringspan.torch as rt
from ringspan.torch import _call, _device, _sessions

DEVICE = os.environ.get("RINGSPAN_TEST_DEVICE", "cuda-emulated")
EMULATED = DEVICE == "cuda-emulated"
MEMORY = "cpu" if EMULATED else DEVICE  # where its tensors lie


def _inputs(n_q, n_k=None, heads=4, kv_heads=2, dim=16, dim_v=None, batch=1, dtype=torch.float32):
    torch.manual_seed(0)
    n_k, dim_v = n_k or n_q, dim_v or dim
    shapes = (batch, n_q, heads, dim), (batch, n_k, kv_heads, dim), (batch, n_k, kv_heads, dim_v)
    return [torch.randn(shape).to(MEMORY, dtype).requires_grad_() for shape in shapes]


def _exact(*tensors):
    """Copies for the reference, which computes in float64 on the CPU."""
    return [t.detach().cpu().double().requires_grad_() for t in tensors]


def _close(actual, expected, *rest):
    assert actual.device == torch.device(MEMORY)
    assert_close(actual.cpu(), expected, *rest)


def _compare(tensors, expected, dtype=torch.float32, extra=(), **options):
    """expected(q, k, v, *extra) -> (o, lse) in float64."""
    o, lse = rt.attention(*tensors, return_lse=True, device=DEVICE, **options)
    d_out, d_lse = torch.randn_like(o), torch.randn_like(lse)
    reference = _exact(*tensors, *extra)
    o_ref, lse_ref = expected(*reference)
    _close(o, o_ref, dtype, "o")
    _close(lse, lse_ref, dtype, "lse")
    ((o * d_out).sum() + (lse * d_lse).sum()).backward()
    ((o_ref * d_out.cpu().double()).sum() + (lse_ref * d_lse.cpu().double()).sum()).backward()
    for name, t, ref in zip(("dq", "dk", "dv", "dsinks"), (*tensors, *extra), reference):
        _close(t.grad, ref.grad, dtype, name)


def _compare_with_cpu(tensors, **options):
    on_cpu = [t.detach().cpu().requires_grad_() for t in tensors]
    o, expected = rt.attention(*tensors, device=DEVICE, **options), rt.attention(*on_cpu, **options)
    o.square().sum().backward()
    expected.square().sum().backward()
    _close(o, expected.double())
    for t, e in zip(tensors, on_cpu):
        _close(t.grad, e.grad.double())


@pytest.mark.parametrize("ranks", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_causal(dtype, ranks):
    mask = mask_of(37, 37, causal=True)
    _compare(_inputs(37, dtype=dtype, batch=2, dim_v=12), lambda q, k, v: attention(q, k, v, mask), dtype, causal=True, ranks=ranks)


@pytest.mark.parametrize("ranks", [None, 2])
def test_windows_lists_and_dilation(ranks):
    offsets = [0, 5, 5, 20, 41]
    mask = mask_of(41, 41, causal=True, cu_q=offsets)
    for cu_seqlens in (offsets, torch.tensor(offsets, dtype=torch.int32)):
        _compare(_inputs(41), lambda q, k, v: attention(q, k, v, mask), causal=True, cu_seqlens=cu_seqlens, ranks=ranks)
    window = mask_of(30, 44, window=(7, 3))
    _compare(_inputs(30, 44), lambda q, k, v: attention(q, k, v, window), window=(7, 3), ranks=ranks)
    counts = dilated_counts(40, 4, [(8, 1), (16, 2)], True)
    options = dict(pattern="dilated:8x1,16x2", causal=True, ranks=ranks, sharding="contiguous", layout="bhsd")
    tensors = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in _inputs(40, kv_heads=4)]
    bshd = [t.transpose(1, 2) for t in _exact(*tensors)]
    o = rt.attention(*tensors, device=DEVICE, **options)
    _close(o.transpose(1, 2), attention(*bshd, counts=counts)[0])
    assert o.is_contiguous()


@pytest.mark.parametrize("ranks", [None, 2])
def test_slopes_sinks_softcap(ranks):
    slopes, sinks = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.randn(4).to(MEMORY).requires_grad_()
    mask = mask_of(29, 29, causal=True)

    def expected(q, k, v, sinks):
        return attention(q, k, v, mask, scale=0.3, softcap=5.0, alibi=slopes, sinks=sinks)

    options = dict(causal=True, scale=0.3, softcap=5.0, alibi_slopes=slopes.to(MEMORY), sinks=sinks, ranks=ranks)
    _compare(_inputs(29), expected, extra=(sinks,), **options)


@pytest.mark.parametrize("ranks", [None, 2])
def test_dropout_is_that_of_the_cpu(ranks):
    _compare_with_cpu(_inputs(33), dropout_p=0.3, dropout_seed=5, ranks=ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_share_an_arena_from_torch(dtype):
    """Several forwards before their backwards, in 16 bits with an o in float32 that leaves the arena; one session for all."""
    rt.forget_plans()
    tensors = [_inputs(33, dtype=dtype) for _ in range(3)]
    outputs = [rt.attention(*t, causal=True, device=DEVICE) for t in tensors]
    for t, o in zip(reversed(tensors), reversed(outputs)):
        o.backward(torch.ones_like(o))
        reference = _exact(*t)
        attention(*reference, mask_of(33, 33, causal=True))[0].sum().backward()
        for x, e in zip(t, reference):
            _close(x.grad, e.grad, dtype)
    (session,) = _sessions.alone._sessions._items.values()
    assert session.place.name == DEVICE and session.arena.numel() == session.core.plan.arena_bytes() > 0


def test_torchscale_keeps_o_of_each_branch():
    _compare_with_cpu(_inputs(48, kv_heads=4), pattern="dilated:16x1,48x2@torchscale", causal=True)


def test_a_compiled_graph():
    tensors = _inputs(20)
    compiled = torch.compile(lambda q, k, v: rt.attention(q, k, v, causal=True, device=DEVICE), fullgraph=True, backend="aot_eager")
    o = compiled(*tensors)
    o.sum().backward()
    reference = _exact(*tensors)
    expected, _ = attention(*reference, mask_of(20, 20, causal=True))
    expected.sum().backward()
    _close(o, expected)
    for t, e in zip(tensors, reference):
        _close(t.grad, e.grad)


def _step(tensors):
    o = rt.attention(*tensors, causal=True, device=DEVICE)
    return o, *torch.autograd.grad(o.square().sum(), tensors)


def _expected(tensors):
    reference = _exact(*tensors)
    o, _ = attention(*reference, mask_of(tensors[0].shape[1], tensors[0].shape[1], causal=True))
    return o, *torch.autograd.grad(o.square().sum(), reference)


on_a_gpu = pytest.mark.skipif(EMULATED, reason="the emulated device has no streams of torch; RINGSPAN_TEST_DEVICE=cuda:0 has")


@on_a_gpu
def test_streams_of_torch():
    """Work before and after on the same stream needs no synchronisation, whichever stream the session was made on."""
    rt.forget_plans()
    tensors = _inputs(300)
    for stream in (torch.cuda.Stream(MEMORY), torch.cuda.default_stream(MEMORY), torch.cuda.Stream(MEMORY)):
        stream.wait_stream(torch.cuda.current_stream(MEMORY))
        with torch.cuda.stream(stream):
            late = [t.detach().mul(2).mul(0.5).requires_grad_() for t in tensors]
            results = [r.clone() for r in _step(late)]
        stream.synchronize()
        for result, expected in zip(results, _expected(tensors)):
            _close(result, expected)


@on_a_gpu
def test_a_cuda_graph():
    rt.forget_plans()
    static, other = _inputs(200), [torch.randn_like(t) for t in _inputs(200)]
    stream = torch.cuda.Stream(MEMORY)
    stream.wait_stream(torch.cuda.current_stream(MEMORY))
    with torch.cuda.stream(stream):
        for _ in range(2):
            _step(static)
    torch.cuda.current_stream(MEMORY).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = _step(static)
    _step([t.clone().requires_grad_() for t in other])  # other task lists come between
    with torch.no_grad():
        for t, value in zip(static, other):
            t.copy_(value)
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize(MEMORY)
    for result, expected in zip(results, _expected(static)):
        _close(result, expected)


def _in_a_group(rank, ranks, stand_in=None):
    if stand_in is not None:
        os.environ["RINGSPAN_EMULATED_NCCL"] = stand_in
        on_host = rt.attention(torch.ones(1, 4, 4, 16), *[torch.ones(1, 4, 2, 16)] * 2, group=dist.group.WORLD, sharding="contiguous")
        assert_close(on_host, torch.ones(1, 4, 4, 16).double())  # a session over the transport that NCCL's takes over
    torch.manual_seed(0)
    n, offsets = 61, [0, 20, 61]
    q, d_out = torch.randn(1, n, 4, 16), torch.randn(1, n, 4, 16)
    k, v = torch.randn(1, n, 2, 16), torch.randn(1, n, 2, 16)
    sinks = torch.linspace(-1, 1, 4)
    mask = mask_of(n, n, causal=True, cu_q=offsets)
    sharding = rt.Sharding("zigzag", tokens=n, ranks=ranks)
    for dtype in (torch.float32, torch.bfloat16):
        own_sinks = sinks.clone().requires_grad_()
        local = [sharding.shard(t, rank=rank).to(dtype).requires_grad_() for t in (q, k, v)]
        options = dict(causal=True, cu_seqlens=offsets, sinks=own_sinks, group=dist.group.WORLD, return_lse=True, device=DEVICE)
        o, lse = rt.attention(*local, **options)
        o.backward(sharding.shard(d_out, rank=rank).to(dtype))
        reference = [t.to(dtype).double().requires_grad_() for t in (q, k, v)] + [sinks.double().requires_grad_()]
        o_ref, lse_ref = attention(*reference[:3], mask, sinks=reference[3])
        o_ref.backward(d_out.to(dtype).double())
        assert_close(o, sharding.shard(o_ref.detach(), rank=rank), dtype)
        assert_close(lse, sharding.shard(lse_ref.detach(), rank=rank, dim=2), dtype)
        for t, e in zip(local, reference):
            assert_close(t.grad, sharding.shard(e.grad, rank=rank), dtype)
        dist.all_reduce(own_sinks.grad)
        assert_close(own_sinks.grad, reference[3].grad, dtype)
    seeded = [sharding.shard(t, rank=rank) for t in (q, k, v)]
    results = [rt.attention(*seeded, dropout_p=0.3, dropout_seed=7, group=dist.group.WORLD, device=d) for d in (None, DEVICE)]
    assert_close(results[1], results[0].double())
    # The other device on one rank: named on both, and the group stays usable.
    with pytest.raises(ringspan.CommError, match=r"ranks disagree on device: (cpu|cuda-emulated) on rank 0"):
        rt.attention(*seeded, group=dist.group.WORLD, device=DEVICE if rank == 0 else None)
    again = rt.attention(*seeded, group=dist.group.WORLD, device=DEVICE)
    assert_close(again, sharding.shard(attention(q, k, v)[0], rank=rank))
    # The calls of a library, whose 16-bit results are merged.
    local = [sharding.shard(t, rank=rank).bfloat16().requires_grad_() for t in (q, k, v)]
    options = dict(causal=True, strategy="ring", sharding="zigzag", group=dist.group.WORLD, device=DEVICE)
    own = rt.attention(*local, **options).detach()
    for asked in (dict(kernel="cudnn"), dict(deterministic=False)):
        o = rt.attention(*local, **options, **asked, partials="storage")
        o.backward(sharding.shard(d_out, rank=rank).bfloat16())
        assert not torch.equal(o, own)
        assert (o.float() - own.float()).abs().max() < 0.03
    with pytest.raises(ringspan.Unsupported, match="rows come from other ranks and are merged"):
        rt.attention(*local, **options, kernel="cudnn")
    with pytest.raises(ringspan.CommError, match="ranks disagree on partials"):
        rt.attention(*local, **options, kernel="cudnn", partials=("float32", "storage")[rank])


emulated_only = pytest.mark.skipif(not EMULATED, reason="two ranks on one GPU; selftest --device cuda runs a GPU per rank")


@emulated_only
def test_two_ranks_of_a_group():
    run_ranks(2, _in_a_group)


def _by_nccl(rank, ranks, stand_in):
    _in_a_group(rank, ranks, stand_in)
    library = ctypes.CDLL(stand_in)  # the one that is loaded
    library.stand_in_count.restype = ctypes.c_int64
    return [library.stand_in_count(what) for what in (1, 2)]  # messages, aborts


@emulated_only
def test_messages_go_by_nccl_from_device_to_device(tmp_path):
    """A stand-in with NCCL's interface, which knows the emulated device's streams. NCCL itself has not run."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the stand-in for NCCL with")
    root = Path(__file__).resolve().parents[2]
    library = str(tmp_path / "libstand_in.so")
    folders = [f"-I{root / folder}" for folder in ("src", "include", "tests")]
    subprocess.run([compiler, "-std=c++20", "-O1", "-shared", "-fPIC", *folders, root / "tests/nccl/stand_in.cc", "-o", library, "-lpthread",
                    "-lrt"], check=True)  # fmt: skip
    for messages, aborts in run_ranks(2, _by_nccl, library):
        assert messages > 10 and aborts == 0


def _without_nccl(rank, ranks):
    os.environ["RINGSPAN_EMULATED_NCCL"] = "/nowhere/libnccl.so.2"
    x = torch.ones(1, 4, 2, 16)
    with pytest.warns(RuntimeWarning, match="messages of this group pass through host memory: .*/nowhere/libnccl.so.2"):
        o = rt.attention(x, x, x, group=dist.group.WORLD, sharding="contiguous", device=DEVICE)
    assert_close(o, x.double())


@emulated_only
def test_without_nccl_messages_pass_through_the_host():
    run_ranks(2, _without_nccl)


def test_nccl_is_asked_for_on_cuda_only(monkeypatch):
    places = [_device.Place(torch.device("cpu"), ""), _device.Place(torch.device("cpu"), "cuda-emulated"), _device.Place(torch.device("cuda", 0), "")]
    monkeypatch.delenv("RINGSPAN_NCCL", raising=False)
    assert [_device.nccl_library(place) for place in places] == [None, None, ""]
    monkeypatch.setenv("RINGSPAN_NCCL", "0")
    assert [_device.nccl_library(place) for place in places] == [None, None, None]


def test_the_ops_are_registered_for_cuda():
    for name in ("attention_forward", "attention_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"ringspan::{name}", "CUDA")


def test_cuda_tensors_give_cuda_tensors(monkeypatch):
    """Everything before and after the op, by torch's fake tensors of a GPU: nothing lands on the CPU or mixes devices."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(ringspan._core, "HAS_CUDA", True)
    sharding = rt.Sharding("zigzag", tokens=24, ranks=3)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k = torch.empty(1, 24, 4, 16, device="cuda"), torch.empty(1, 24, 2, 16, device="cuda")
        vectors = dict(sinks=torch.empty(4, device="cuda"), alibi_slopes=torch.empty(4, device="cuda"))
        for options in (vectors, dict(cu_seqlens=[0, 5, 24]), dict(dropout_p=0.1), dict(device="cuda"), dict(device="cuda:0")):
            o, lse = rt.attention(q, k, k, causal=True, return_lse=True, **options)
            assert o.device == lse.device == q.device and o.shape == q.shape and lse.shape == (1, 4, 24)
        with pytest.raises(ringspan.InvalidArgument, match="sinks is on cpu, but q is on cuda:0"):
            rt.attention(q, k, k, sinks=torch.empty(4))
        with pytest.raises(ringspan.InvalidArgument, match="device is cpu, but q is on cuda:0"):
            rt.attention(q, k, k, device="cpu")
        with pytest.raises(ringspan.InvalidArgument, match="cuda-emulated, whose memory is tensors of the CPU, but q is on cuda:0"):
            rt.attention(q, k, k, device="cuda-emulated")
        parts = [sharding.shard(q, rank=rank) for rank in range(3)]
        assert {t.device for t in (*parts, sharding.unshard(parts))} == {q.device}
        monkeypatch.setattr(ringspan._core, "HAS_CUDA", False)
        with pytest.raises(ringspan.Unsupported, match="q is on cuda:0, but this ringspan was built without CUDA"):
            rt.attention(q, k, k)


# ---- what only CUDA has, with torch's functions replaced: which stream is given, and what waits for what


class _Core:
    def set_seed(self, seed):
        self.seed = seed

    def __repr__(self):
        return "core"


class _Stream:
    def __init__(self, handle, log):
        self.cuda_stream, self._log = handle, log

    def wait_stream(self, other):
        self._log.append((self.cuda_stream, other.cuda_stream))


@pytest.fixture
def cuda(monkeypatch):
    """A place on cuda:1, the stream that is current there, and what waited."""
    state = types.SimpleNamespace(log=[], capturing=False)
    state.streams = [_Stream(handle, state.log) for handle in (0, 17)]
    state.current = state.streams[0]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.current)
    monkeypatch.setattr(_device, "current_handle", lambda device: state.current.cuda_stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    state.place = _device.Place(torch.device("cuda", 1), "")
    return state


def test_the_current_stream_is_given(cuda):
    made = []
    assert cuda.place.name == "cuda:1" and cuda.place.kind == "cuda"
    for cuda.current in cuda.streams:
        _device.Session(cuda.place, lambda *where: made.append(where))
    # 0 would be a stream of the library's own: the default stream has another name.
    assert made == [("cuda:1", 1), ("cuda:1", 17)]


def test_another_stream_is_ordered_around_a_call(cuda):
    first, second = cuda.streams
    session = _device.Session(cuda.place, lambda device, stream: _Core())
    session.run(lambda core: cuda.log.append(repr(core)))
    assert cuda.log == ["core"]
    cuda.current = second
    cuda.log.clear()
    session.run(lambda core: cuda.log.append(repr(core)))
    assert cuda.log == [(0, 17), "core", (17, 0)]
    cuda.log.clear()

    def fails(core):
        raise ringspan.DeviceError("out of ink")

    with contextlib.suppress(ringspan.DeviceError):
        session.run(fails)
    assert cuda.log == [(0, 17), (17, 0)]


def test_a_capture_makes_no_session(cuda):
    cuda.capturing = True
    call = _call.Call(*_inputs(8), *[None] * 7, _text())
    call.place = cuda.place
    alone = _sessions.Alone()
    with pytest.raises(ringspan.Unsupported, match="has set everything aside"):
        alone.run(call, 0, None, None)
    # One that was made on the default stream stays for other calls; one of another stream is captured, and kept for the graph.
    key = (call.key, 1, False)
    for cuda.current in cuda.streams:
        made = _device.Session(cuda.place, lambda device, stream: _Core())
        alone._sessions.put(key, made)
        with pytest.raises(ringspan.Unsupported) if cuda.current.cuda_stream == 0 else contextlib.nullcontext():
            alone.run(call, 0, lambda core: cuda.log.append(repr(core)), None)
        assert alone._sessions.get(key) is made
    assert cuda.log == ["core"] and alone._captured == [made]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_library_computes_where_it_is_let(dtype):
    """deterministic=False: cuDNN's calls, on the emulated device an emulation of them."""
    tensors = _inputs(37, dtype=dtype, batch=2, dim_v=24)
    reference = _exact(*tensors)
    o_ref, _ = attention(*reference, mask_of(37, 37, causal=True))
    o = rt.attention(*tensors, causal=True, deterministic=False, device=DEVICE)
    chosen = rt.kernels()
    if "cudnn" not in chosen["forward"][0]:
        assert not EMULATED
        pytest.skip(chosen["forward"][1])
    if "cudnn" not in chosen["backward"][0]:  # a library may refuse one pass only
        assert not EMULATED and chosen["backward"][1]
        pytest.skip(chosen["backward"][1])
    assert chosen["backward"][1] == ""
    _close(o, o_ref, dtype, "o")
    d_out = torch.randn_like(o[:1])
    o.backward(d_out.expand_as(o))  # which it cannot load from
    o_ref.backward(d_out.cpu().double().expand_as(o_ref))
    for name, t, ref in zip(("dq", "dk", "dv"), tensors, reference):
        assert (t.grad.cpu().double() - ref.grad).abs().max() <= 0.04 * ref.grad.abs().max() + 0.01, name  # delta is of a rounded o
    rt.attention(*tensors, causal=True, device=DEVICE)
    assert "deterministic" in rt.kernels()["forward"][1]
    rt.attention(*tensors, causal=True, softcap=5.0, deterministic=False, device=DEVICE)
    assert "softcap" in rt.kernels()["backward"][1]
    with pytest.raises(ringspan.Unsupported, match="'cudnn' cannot compute this: fused calls have no softcap"):
        rt.attention(*tensors, causal=True, softcap=5.0, kernel="cudnn", device=DEVICE)
    with pytest.raises(ringspan.InvalidArgument, match="no gradient through lse"):
        rt.attention(*tensors, causal=True, deterministic=False, return_lse=True, device=DEVICE)[1].sum().backward()


@pytest.mark.skipif(not EMULATED, reason="a deterministic backward pass may need much memory")
def test_a_library_can_be_named():
    tensors = _inputs(21, dtype=torch.bfloat16, dim=24)
    rt.attention(*tensors, kernel="cudnn", device=DEVICE).square().sum().backward()
    assert [kernel for kernel, _ in rt.kernels().values()] == ["attend_cudnn_emulated", "attend_backward_cudnn_emulated"]
    rt.attention(*tensors, kernel="own", deterministic=False, device=DEVICE)
    assert rt.kernels()["forward"] == ("attend_mma", "no fused attention of a library: attend_kernel is 'own'")


@pytest.mark.skipif(not EMULATED, reason="a deterministic backward pass may need much memory")
@pytest.mark.parametrize("asked", [dict(kernel="cudnn"), dict(deterministic=False)])
def test_a_library_computes_rows_of_several_calls(asked):
    """partials="storage": overlapping branches on one rank, and simulated ranks."""
    tensors = _inputs(64, dtype=torch.bfloat16, dim=32)
    with pytest.raises(ringspan.Unsupported, match="more than one call"):
        rt.attention(*tensors, pattern="dilated:16x1,32x2", kernel="cudnn", device=DEVICE)

    def results(**named):
        for t in tensors:
            t.grad = None
        o = rt.attention(*tensors, device=DEVICE, **named)
        o.backward(torch.ones_like(o))
        return o.detach(), *(t.grad for t in tensors)

    for call in (dict(pattern="dilated:16x1,32x2"), dict(causal=True, ranks=3, strategy="ring")):
        own = results(**call)
        stored = results(**call, **asked, partials="storage")
        if "ranks" not in call:
            assert [kernel for kernel, _ in rt.kernels().values()] == ["attend_cudnn_emulated", "attend_backward_cudnn_emulated"]
        for name, a, b in zip(("o", "dq", "dk", "dv"), stored, own):
            assert not torch.equal(a, b), name
            assert (a.float() - b.float()).abs().max() <= 0.03 * b.float().abs().max() + 0.01, name


def test_partials_of_no_library_are_refused():
    tensors = _inputs(16, dtype=torch.bfloat16)
    with pytest.raises(ringspan.Unsupported, match="partials 'storage'.*none may compute"):
        rt.attention(*tensors, partials="storage", device=DEVICE)
    with pytest.raises(ringspan.Unsupported, match="partials 'storage'.*dtype is float32"):
        rt.attention(*_inputs(16), partials="storage", kernel="cudnn", device=DEVICE)
    if EMULATED:
        with pytest.raises(ringspan.Unsupported, match="partials 'storage'.*computes on the CPU"):
            rt.attention(*tensors, partials="storage")


def _text():
    from ringspan._sharding import Dealt
    from ringspan.torch._spec import encode, with_backward

    names = encode.__code__.co_varnames[: encode.__code__.co_argcount]
    values = dict(pattern="full", causal=False, window=None, documents=False, scale=None, softcap=0.0, dropout=0.0,
                  seeded=False, ranks=0, sharding=Dealt.of("contiguous"), sharding_k=Dealt.of("contiguous"), strategy="auto", layout="bshd",
                  deadline=30.0)  # fmt: skip
    zeros = ("replicated_q", "memory_budget", "bucket_rows", "host_tensors", "deterministic")
    return with_backward(encode(*(values.get(name, 0 if name in zeros else "") for name in names)))
