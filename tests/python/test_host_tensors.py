"""ringspan.torch.attention with host_tensors=True: tensors in pinned memory of the host stream through a device, forward and backward.

The device is the emulated one, which takes any tensor of the CPU for pinned, or what RINGSPAN_TEST_DEVICE names ("cuda:0")."""

import os

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
HOST = dict(device=DEVICE, host_tensors=True)
PINNED = {} if EMULATED else {"pin_memory": True}


def _pinned(t):
    return torch.empty(t.shape, dtype=t.dtype, **PINNED).copy_(t)


def _inputs(n_q, n_k=None, heads=4, kv_heads=2, dim=16, dim_v=None, batch=1, dtype=torch.float32):
    torch.manual_seed(0)
    n_k, dim_v = n_k or n_q, dim_v or dim
    shapes = (batch, n_q, heads, dim), (batch, n_k, kv_heads, dim), (batch, n_k, kv_heads, dim_v)
    return [_pinned(torch.randn(shape).to(dtype)).requires_grad_() for shape in shapes]


def _exact(*tensors):
    return [t.detach().cpu().double().requires_grad_() for t in tensors]


def _close(actual, expected, dtype=torch.float32, what=""):
    assert actual.device.type == "cpu" and (EMULATED or actual.is_pinned()), what
    assert_close(actual, expected, dtype, what)


def _compare(tensors, expected, dtype=torch.float32, rows=11, extra=(), **options):
    """In pieces of `rows` against expected(q, k, v, *extra) -> (o, lse) in float64."""
    o, lse = rt.attention(*tensors, return_lse=True, bucket_rows=rows, **HOST, **options)
    d_out, d_lse = torch.randn_like(o), torch.randn_like(lse)  # pageable, as what autograd hands in
    reference = _exact(*tensors, *extra)
    o_ref, lse_ref = expected(*reference)
    _close(o, o_ref, dtype, "o")
    _close(lse, lse_ref, dtype, "lse")
    ((o * d_out).sum() + (lse * d_lse).sum()).backward()
    ((o_ref * d_out.double()).sum() + (lse_ref * d_lse.double()).sum()).backward()
    for name, t, ref in zip(("dq", "dk", "dv"), tensors, reference):
        _close(t.grad, ref.grad, dtype, name)
    for t, ref in zip(extra, reference[3:]):
        assert t.grad.device == t.device
        assert_close(t.grad.cpu(), ref.grad, dtype, "dsinks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_causal_in_each_dtype(dtype):
    mask = mask_of(37, 37, causal=True)
    for kv_heads in (1, 2, 4):
        _compare(_inputs(37, kv_heads=kv_heads, dtype=dtype, batch=2, dim_v=12), lambda q, k, v: attention(q, k, v, mask), dtype, causal=True)


@pytest.mark.parametrize("rows", [5, 16, 1000])
def test_windows_documents_lengths(rows):
    window = mask_of(30, 44, window=(7, 3))
    _compare(_inputs(30, 44), lambda q, k, v: attention(q, k, v, window), rows=rows, window=(7, 3))
    offsets = [0, 5, 5, 20, 41]
    documents = mask_of(41, 41, causal=True, cu_q=offsets)
    for cu_seqlens in (offsets, torch.tensor(offsets, dtype=torch.int32)):
        _compare(_inputs(41), lambda q, k, v: attention(q, k, v, documents), rows=rows, causal=True, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dilated_segments(dtype):
    counts = dilated_counts(40, 4, [(8, 1), (16, 2), (40, 4)], True)
    _compare(_inputs(40, kv_heads=4, dtype=dtype), lambda q, k, v: attention(q, k, v, counts=counts), dtype,
             pattern="dilated:8x1,16x2,40x4", causal=True)  # fmt: skip


@pytest.mark.parametrize("vectors", ["cpu", DEVICE])
def test_slopes_and_sinks_may_be_on_the_host_or_on_the_device(vectors):
    vectors = "cpu" if EMULATED else vectors
    slopes, sinks = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.randn(4).to(vectors).requires_grad_()
    mask = mask_of(29, 29, causal=True)

    def expected(q, k, v, sinks):
        return attention(q, k, v, mask, scale=0.3, softcap=5.0, alibi=slopes, sinks=sinks)

    _compare(_inputs(29), expected, extra=(sinks,), causal=True, scale=0.3, softcap=5.0, alibi_slopes=slopes.to(vectors), sinks=sinks)


def test_dropout_is_that_of_the_cpu():
    tensors, on_cpu = _inputs(33), [t.detach().clone().requires_grad_() for t in _inputs(33)]
    options = dict(dropout_p=0.3, dropout_seed=5)
    o, expected = rt.attention(*tensors, bucket_rows=8, **HOST, **options), rt.attention(*on_cpu, **options)
    o.square().sum().backward()
    expected.square().sum().backward()
    _close(o, expected.double())
    for t, e in zip(tensors, on_cpu):
        _close(t.grad, e.grad.double())


def test_gradients_are_the_slopes_of_the_function():
    """Central differences along random directions, of the streamed forward pass itself."""
    tensors = _inputs(23)
    weight = torch.randn(1, 23, 4, 16)

    def value(q, k, v):
        o, lse = rt.attention(q, k, v, causal=True, bucket_rows=6, return_lse=True, **HOST)
        return (o * weight).double().sum() + lse.double().sum()

    value(*tensors).backward()
    step = 1e-2
    for index in range(3):
        direction = torch.randn_like(tensors[index])
        moved = [[_pinned(t.detach() + (sign * step * direction if i == index else 0)) for i, t in enumerate(tensors)] for sign in (1, -1)]
        difference = (value(*moved[0]) - value(*moved[1])) / (2 * step)
        expected = (tensors[index].grad * direction).double().sum()
        assert abs(difference - expected) < 2e-3 * max(1.0, abs(expected)), f"{'qkv'[index]}: {difference} is not {expected}"


def test_layouts_and_views_of_one_tensor():
    torch.manual_seed(1)
    n, mask = 26, mask_of(26, 26, causal=True)
    packed = _pinned(torch.randn(1, n, 3, 4, 16)).requires_grad_()
    reference = packed.detach().double().requires_grad_()
    expected, _ = attention(*reference.unbind(2), mask)
    expected.sum().backward()
    for layout in ("bshd", "bhsd", "thd"):
        packed.grad = None
        views = packed.unbind(2)
        if layout == "bhsd":
            views = [t.transpose(1, 2) for t in views]
        elif layout == "thd":
            views = [t[0] for t in views]
        o = rt.attention(*views, causal=True, layout=layout, bucket_rows=7, **HOST)
        o.sum().backward()
        _close(o.transpose(1, 2) if layout == "bhsd" else o[None] if layout == "thd" else o, expected)
        assert_close(packed.grad, reference.grad)  # made by torch: not pinned
    strided = _pinned(torch.randn(1, n, 4, 32))[..., ::2]  # no dense last dimension: copied, to pinned memory
    _close(rt.attention(strided, strided, strided, causal=True, bucket_rows=7, **HOST), attention(strided, strided, strided, mask)[0])


def _in_a_group(rank, ranks):
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
        options = dict(causal=True, cu_seqlens=offsets, sinks=own_sinks, group=dist.group.WORLD, sharding=sharding, bucket_rows=8, **HOST)
        o, lse = rt.attention(*local, return_lse=True, **options)
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
    # The option on one rank only, and another strategy: an error on all, and the group stays usable.
    parts = [sharding.shard(t, rank=rank) for t in (q, k, v)]
    options = dict(group=dist.group.WORLD, sharding=sharding, device=DEVICE)
    with pytest.raises(ringspan.CommError, match="ranks disagree on host_tensors: (True|False) on rank 0"):
        rt.attention(*parts, host_tensors=rank == 0, **options)
    with pytest.raises(ringspan.Unsupported, match=r"strategy \(ring\) must be auto or exchange"):
        rt.attention(*parts, host_tensors=True, strategy="ring", **options)
    with pytest.raises(ringspan.InvalidArgument, match="host_tensors=True needs device="):
        rt.attention(*parts, host_tensors=True, group=dist.group.WORLD, device=None if rank == 1 else DEVICE)
    assert_close(rt.attention(*parts, host_tensors=True, **options), sharding.shard(attention(q, k, v)[0], rank=rank))


@pytest.mark.skipif(not EMULATED, reason="two ranks on one GPU")
def test_ranks_of_a_group():
    run_ranks(2, _in_a_group)


def test_layers_share_a_session_and_its_arena():
    rt.forget_plans()
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [_inputs(33, dtype=dtype) for _ in range(3)]
        outputs = [rt.attention(*t, causal=True, bucket_rows=8, **HOST) for t in tensors]
        for t, o in zip(reversed(tensors), reversed(outputs)):
            o.backward(torch.ones_like(o))
            reference = _exact(*t)
            attention(*reference, mask_of(33, 33, causal=True))[0].sum().backward()
            for x, e in zip(t, reference):
                _close(x.grad, e.grad, dtype)
    sessions = list(_sessions.alone._sessions._items.values())
    assert len(sessions) == 2
    for session in sessions:
        assert session.place.name == DEVICE and session.arena.numel() == session.core.plan.arena_bytes() > 0
        assert session.arena.device.type == ("cpu" if EMULATED else "cuda")


def test_a_compiled_graph():
    tensors = _inputs(20)

    def step(q, k, v):
        return rt.attention(q, k, v, causal=True, bucket_rows=6, device=DEVICE, host_tensors=True)

    o = torch.compile(step, fullgraph=True, backend="aot_eager")(*tensors)
    o.sum().backward()
    reference = _exact(*tensors)
    expected, _ = attention(*reference, mask_of(20, 20, causal=True))
    expected.sum().backward()
    _close(o, expected)
    for t, e in zip(tensors, reference):
        assert_close(t.grad, e.grad)


def test_a_budget_of_the_device_sizes_the_pieces():
    """The tensors are no part of it, and the forecast is that of ringspan.plan, which needs no device."""
    shape = dict(heads=4, kv_heads=2, head_dim=16, causal=True, device="cuda", host_tensors=True)
    free = ringspan.plan(2000, **shape)
    budget = free.memory_bytes(backward=True) // 2
    plan = ringspan.plan(2000, memory_budget=budget, **shape)
    assert plan.memory_bytes(backward=True) <= budget and plan.bucket_rows < free.bucket_rows
    lines = plan.memory(backward=True)
    tensors = sum(lines[name] for name in ("q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"))
    assert plan.pinned_bytes(backward=True) == tensors + lines["pinned task lists"] + lines["pinned messages"]
    (q_rows, kv_rows) = (2000 * 4, 2000 * 2 * 2)
    to_device, to_host = plan.host_bytes()
    assert to_host == q_rows * (16 * 4 + 4) and to_device >= (q_rows + kv_rows) * 16 * 4
    assert ringspan.plan(2000, heads=4, device="cuda").host_bytes() == (0, 0)
    assert ringspan.plan(2000, heads=4, device=torch.device("cuda", 1)).fingerprint == ringspan.plan(2000, heads=4, device="cuda").fingerprint
    with pytest.raises(ringspan.InvalidArgument, match=r"device \(5\) must be a text"):
        ringspan.plan(8, device=5)
    rt.forget_plans()
    tensors = _inputs(400)
    o = rt.attention(*tensors, causal=True, memory_budget=budget, **HOST)
    (session,) = _sessions.alone._sessions._items.values()
    assert session.core.plan.bucket_rows <= plan.bucket_rows and session.core.plan.memory_bytes(True) <= budget
    _close(o, attention(*_exact(*tensors), mask_of(400, 400, causal=True))[0])
    with pytest.raises(ringspan.OutOfBudget, match="the smallest possible is [0-9]+ bytes"):
        rt.attention(*tensors, causal=True, memory_budget=1000, **HOST)


def test_refusals_name_the_reason(monkeypatch):
    q, k, v = (t.detach() for t in _inputs(8))

    def refused(error, match, *tensors, **options):
        with pytest.raises(error, match=match):
            rt.attention(*(tensors or (q, k, v)), **{**HOST, **options})

    refused(ringspan.InvalidArgument, "host_tensors=True needs device=", device=None)
    refused(ringspan.InvalidArgument, "host_tensors=True needs device=", device="cpu")
    refused(ringspan.InvalidArgument, "unknown device 'gpu'", device="gpu")
    refused(ringspan.InvalidArgument, r"host_tensors \(1\) must be True or False", host_tensors=1)
    refused(ringspan.Unsupported, r"ranks \(2\) are simulated", ranks=2)
    refused(ringspan.Unsupported, "torchscale", pattern="dilated:4x1@torchscale")
    refused(ringspan.Unsupported, "names a kernel of the CPU", kernel="attend_f32_reference")
    with torch.autocast("cpu", torch.bfloat16):
        refused(ringspan.InvalidArgument, "autocast would turn q, k, v into torch.bfloat16 in pageable memory")
    with pytest.raises(ringspan.InvalidArgument, match="q.to\\('cuda:0'\\) does, and host_tensors=True computes there"):
        rt.attention(q, k, v, device="cuda:0")
    with pytest.raises(ringspan.InvalidArgument, match="unknown kind of device .gpu."):
        ringspan.plan(8, device="gpu", host_tensors=True)
    with pytest.raises(ringspan.Unsupported, match="this rank computes on the CPU"):
        ringspan.plan(8, host_tensors=True)
    monkeypatch.setattr(ringspan._core, "HAS_CUDA", False)
    refused(ringspan.Unsupported, "device is cuda:0, but this ringspan was built without CUDA", device="cuda:0")


def test_what_is_pinned_on_a_gpu(monkeypatch):
    """torch's functions replaced: pageable tensors are refused, gradients that come in are copied, results are asked for pinned."""
    monkeypatch.setattr(ringspan._core, "HAS_CUDA", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    q, k, v = (torch.zeros(1, 8, 2, 16) for _ in range(3))
    options = dict(device="cuda:1", host_tensors=True)
    with pytest.raises(ringspan.Unsupported, match="device is cuda:1, but torch finds no CUDA device"):
        rt.attention(q, k, v, **options)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pinned = {q.data_ptr(), v.data_ptr()}
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda t: t.data_ptr() in pinned)
    with pytest.raises(ringspan.InvalidArgument, match=r"k is in pageable memory, .* k = k.pin_memory\(\)"):
        rt.attention(q, k, v, **options)
    place = _device.Place(torch.device("cpu"), "cuda:1", True)
    assert place.name == "cuda:1" and place.device == torch.device("cuda", 1) and place.pins
    asked = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **named: asked.append(pin_memory) or empty(*shape, **named))
    assert place.pinned(q) is q and place.pinned(None) is None and place.dense_rows(q) is q and asked == []
    copy = place.pinned(k.add(1))
    assert torch.equal(copy, k + 1) and asked == [True]
    assert place.dense_rows(torch.ones(1, 1, 1, 1).expand(1, 2, 2, 4)).stride(-1) == 1 and asked == [True, True]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert _device.Place(torch.device("cpu"), "cuda", True).name == "cuda:3"
    assert not _device.Place(torch.device("cpu"), "cuda-emulated", True).pins


def test_a_capture_is_refused(monkeypatch):
    call = _call.Call(*_inputs(8), *[None] * 7, _text())
    monkeypatch.setattr(call.place, "is_capturing", lambda: True)
    with pytest.raises(ringspan.Unsupported, match="a CUDA graph cannot hold a call with host_tensors"):
        _sessions.Alone().run(call, 0, None, None)


def _text():
    from ringspan._sharding import Dealt
    from ringspan.torch._spec import encode, with_backward

    dealt = Dealt.of("contiguous")
    return with_backward(encode(
        pattern="full", causal=False, window=None, documents=False, scale=None, softcap=0.0, dropout=0.0, seeded=False, ranks=0,
        sharding=dealt, sharding_k=dealt, replicated_q=False, strategy="auto", layout="bshd", deadline=30.0, memory_budget=0,
        bucket_rows=0, kernel="", device="cuda-emulated", host_tensors=True, deterministic=True,
    ))  # fmt: skip
