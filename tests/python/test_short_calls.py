"""One call of the extension per pass: how it reads torch's tensors and makes new ones, and that both ways of each give the same."""

import ctypes
import sys
import types
import weakref

import numpy as np
import pytest
import torch

import ringspan
import ringspan.torch as rt
from ringspan import _core, _threads
from ringspan.torch import _attention, _device, _execute

_TABLE = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)


@pytest.fixture
def reading():
    """Reads tensors by the table or by methods from then on."""
    yield lambda table: _core.read_tensors_by(_TABLE if table else None)
    _core.read_tensors_by(_TABLE)


@pytest.fixture
def calls_in_one(monkeypatch):
    """The methods of sessions that passes of one rank call."""
    names = []
    original = _device.Session._run

    def run(session, execute):
        class Core:
            def __getattr__(self, name):
                names.append(name)
                return getattr(session.core, name)

        stand_in = types.SimpleNamespace(stream=session.stream, place=session.place, core=Core())
        return original(stand_in, execute)

    monkeypatch.setattr(_device.Session, "_run", run)
    return names


def _inputs(layout="bshd", dtype=torch.float32, kv_heads=4, grad=True, batch=2, tokens=9):
    torch.manual_seed(0)
    tensors = []
    for heads in (4, kv_heads, kv_heads):
        t = torch.randn(batch, tokens, heads, 16).to(dtype)
        t = t[0] if layout == "thd" else t.transpose(1, 2).contiguous() if layout == "bhsd" else t
        tensors.append(t.requires_grad_(grad))
    return tensors


def _results(tensors, dlse=True, **options):
    o, lse = rt.attention(*tensors, return_lse=True, **options)
    leaves = [t for t in tensors if t.requires_grad]
    loss = o.float().square().sum() + (lse.sum() if dlse else 0)
    return [o.detach(), lse.detach(), *(torch.autograd.grad(loss, leaves) if leaves else ())]


def _same(one, other):
    return len(one) == len(other) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and a.data_ptr() != b.data_ptr() and torch.equal(a, b) for a, b in zip(one, other)
    )


def test_this_torch_has_the_table():
    assert _device.READS_BY_TABLE is (_TABLE is not None)
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13):
        assert _device.READS_BY_TABLE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("where", [{}, dict(device="cuda-emulated")])
def test_both_ways_of_reading_give_the_same_bits(reading, calls_in_one, dtype, layout, where):
    for kv_heads, grad in ((4, True), (2, True), (1, False)):
        tensors = _inputs(layout, dtype, kv_heads, grad)
        ways = []
        for table in (True, False):
            assert reading(table) is (table and _TABLE is not None)
            ways.append(_results(tensors, causal=True, layout=layout, **where))
        assert _same(*ways)
    assert calls_in_one == ["forward_new", "backward_new"] * 4 + ["forward_new"] * 2


@pytest.mark.parametrize("table, where", [(True, {}), (False, {}), (True, dict(device="cuda-emulated"))])
def test_views(reading, calls_in_one, table, where):
    """In place where the last dimension is dense: of one matrix, every second token, expanded; copied where it is not."""
    reading(table)
    packed = torch.randn(2, 18, 3, 4, 16, requires_grad=True)
    swapped = torch.randn(2, 9, 16, 4).transpose(2, 3)
    one_head = torch.randn(2, 9, 1, 16).expand(2, 9, 4, 16)
    for tensors in ([packed[:, ::2, i] for i in range(3)], [swapped, one_head, swapped], [one_head[..., :1], swapped[..., :1], swapped]):
        dense = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in tensors]
        results = [rt.attention(*given, causal=True, **where) for given in (tensors, dense)]
        assert torch.equal(*results)
        if tensors[0].requires_grad:
            (d_packed,) = torch.autograd.grad(results[0].sum(), packed)
            for i, expected in enumerate(torch.autograd.grad(results[1].sum(), dense)):
                assert torch.equal(d_packed[:, ::2, i], expected)
    assert "forward_new" in calls_in_one and "backward_new" in calls_in_one and "forward" not in calls_in_one


def test_gradients_that_are_strided_or_expanded():
    tensors = _inputs()
    o = rt.attention(*tensors)
    for d_out in (torch.ones(()).expand_as(o), torch.randn(2, 9, 16, 4).transpose(2, 3)):
        expected = torch.autograd.grad(o, tensors, d_out.clone(memory_format=torch.contiguous_format), retain_graph=True)
        assert all(map(torch.equal, torch.autograd.grad(o, tensors, d_out, retain_graph=True), expected))


def test_what_is_not_taken_in_one(calls_in_one):
    q, k, v = _inputs(grad=False)
    rt.attention(q, k, v, sinks=torch.zeros(4))
    rt.attention(q, k, v, alibi_slopes=torch.ones(4))
    rt.attention(q, k, v, dropout_p=0.5, dropout_seed=1)
    assert calls_in_one == ["forward"] * 3
    assert rt.attention(q[:0], k[:0], v[:0]).shape == (0, 9, 4, 16)
    rt.attention(q, k, v, ranks=2)
    assert calls_in_one == ["forward"] * 3


def test_modes_of_torch():
    q, k, v = _inputs()
    expected = rt.attention(q, k, v).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            o = rt.attention(q, k, v)
        assert torch.equal(o, expected) and not o.requires_grad and o.is_inference() is (mode is torch.inference_mode)
    for requires in ((True, False, False), (False, True, False), (False, False, True)):
        given = [t.detach().requires_grad_(r) for t, r in zip((q, k, v), requires)]
        rt.attention(*given).sum().backward()
        assert [t.grad is not None for t in given] == list(requires)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rt.attention(q, k, v), rt.attention(*(t.bfloat16() for t in (q, k, v))))


class _Header(ctypes.Structure):
    pass


_Header._fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("older", ctypes.POINTER(_Header)), ("functions", ctypes.c_void_p * 5)]


def _capsule(table, name=b"dlpack_exchange_api"):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return new(ctypes.addressof(table), name, None)


def test_a_table_of_another_version_is_not_used(reading):
    tensors = _inputs()
    expected = _results(tensors)
    newer = _Header(major=2)
    assert _core.read_tensors_by(_capsule(newer)) is False
    assert _same(_results(tensors), expected)
    assert _core.read_tensors_by(_capsule(_Header(major=1))) is False  # without the function that reads
    assert _core.read_tensors_by(_capsule(newer, b"another")) is False and _core.read_tensors_by(3) is False
    assert _same(_results(tensors), expected)
    if _TABLE is None:
        return
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    newer.older = ctypes.cast(get(_TABLE, b"dlpack_exchange_api"), ctypes.POINTER(_Header))
    assert _core.read_tensors_by(_capsule(newer)) is True
    assert _same(_results(tensors), expected)


@pytest.mark.parametrize("table", [True, False])
def test_what_is_no_tensor_is_refused(reading, table):
    reading(table)
    rt.attention(*_inputs(grad=False))
    session = rt._sessions.alone.latest.core
    q, k, v = _inputs(grad=False)
    for wrong in (3, "q", q.numpy(), q[0, 0, 0, 0], q[None]):
        with pytest.raises(TypeError):
            session.forward(wrong, k, v, q, q)
        with pytest.raises(TypeError):
            session.forward_new(torch.empty_strided, (), wrong, k, v)


def test_errors_of_the_library_pass_through(calls_in_one):
    raw = torch.zeros(4 * 2 * 9 * 4 * 16 + 1, dtype=torch.uint8)
    odd = torch.frombuffer(raw.numpy().data, dtype=torch.float32, offset=1, count=2 * 9 * 4 * 16).view(2, 9, 4, 16)
    q, k, v = _inputs(grad=False)
    texts = []
    for way in ("in one", "by steps"):
        with pytest.raises(ringspan.InvalidArgument, match="aligned") as told:
            rt.attention(odd, k, v, **({} if way == "in one" else dict(sinks=torch.full((4,), -float("inf")))))
        texts.append(str(told.value))
    assert texts[0] == texts[1] and calls_in_one == ["forward_new", "forward"]
    holders = [sys.getrefcount(t) for t in (odd, k, v)]
    for _ in range(50):
        with pytest.raises(ringspan.InvalidArgument):
            rt.attention(odd, k, v)
    assert [sys.getrefcount(t) for t in (odd, k, v)] == holders
    assert torch.isfinite(rt.attention(q, k, v)).all()


def _resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096


@pytest.mark.parametrize("table", [True, False])
def test_nothing_is_kept(monkeypatch, reading, table):
    reading(table)
    monkeypatch.setattr(_threads, "_threads", 1)
    tensors = _inputs(dtype=torch.bfloat16)
    strided = [torch.randn(2, 9, 16, 4).transpose(2, 3) for _ in range(3)]
    holders, most = None, 0
    for turn in range(4000):
        o = rt.attention(*tensors)
        torch.autograd.grad(o.sum(), tensors)
        rt.attention(*strided)
        gone = weakref.ref(o)
        del o
        assert gone() is None
        if turn == 1000:
            holders, most = [sys.getrefcount(t) for t in (*tensors, *strided)], _resident()
    assert [sys.getrefcount(t) for t in (*tensors, *strided)] == holders
    assert _resident() - most < 4 << 20  # a result that stays would be 3000 times 2304 bytes at least


def test_results_without_what_torchs_compiler_calls(monkeypatch, calls_in_one):
    tensors = _inputs(dtype=torch.bfloat16)
    expected = _results(tensors)
    monkeypatch.setattr(_device, "_guards", None)
    _attention._RECENT.clear()
    _device._place_of.cache_clear()
    made = []
    monkeypatch.setattr(torch, "empty_strided", lambda *given, original=torch.empty_strided, **named: made.append(given) or original(*given, **named))
    try:
        assert _same(_results(tensors), expected)
    finally:
        _attention._RECENT.clear()
        _device._place_of.cache_clear()
    assert len(made) == 6  # o, lse, o in float32, three gradients


def test_results_on_the_device_of_the_tensors(monkeypatch):
    """What torch's compiler calls makes them on the current one."""
    made = []
    monkeypatch.setattr(_device, "_guards", types.SimpleNamespace(_empty_strided_cuda=lambda *given: made.append("current")))
    monkeypatch.setattr(torch, "empty_strided", lambda *given, device, **named: made.append(device))
    empty = _device.Place(torch.device("cuda", 1), "").empty
    for current in (1, 0):
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda current=current: current, raising=False)
        empty((1,), (1,), torch.float32)
    assert made == ["current", torch.device("cuda", 1)]


def test_backward_takes_one_call_too(monkeypatch):
    seen = []
    monkeypatch.setattr(_execute, "backward_alone", lambda *a, original=_execute.backward_alone: seen.append(a[0].in_one) or original(*a))
    rt.attention(*_inputs()).sum().backward()
    assert seen == [True]


def test_what_changes_is_looked_at_again():
    """Of a call that was found before nothing is checked again: only what cannot have changed is found."""
    q, k, v = _inputs(grad=False)
    full, causal, near = (rt.attention(q, k, v, pattern=text) for text in ("full", "causal", "window:1,0"))
    assert not torch.equal(full, causal) and not torch.equal(causal, near)
    pattern, window = ringspan.Pattern("full"), [8, 8]
    for _ in range(2):
        assert torch.equal(rt.attention(q, k, v, pattern=pattern), full)
        assert torch.equal(rt.attention(q, k, v, window=window), full)
    pattern.causal, window[:] = True, [1, 0]
    assert torch.equal(rt.attention(q, k, v, pattern=pattern), causal)
    assert torch.equal(rt.attention(q, k, v, window=window), near)
    assert torch.equal(rt.attention(q, k, v, window=(1, 0)), near)
    sharding = rt.Sharding("zigzag", tokens=9, ranks=2)
    rt.attention(q, k, v, ranks=2, sharding=sharding)
    sharding.tokens = 10
    for given in (sharding, rt.Sharding("zigzag", tokens=10, ranks=2)):
        with pytest.raises(ringspan.InvalidArgument, match="10 tokens"):
            rt.attention(q, k, v, ranks=2, sharding=given)


@pytest.mark.parametrize("table", [True, False])
def test_what_is_equal_is_found(monkeypatch, reading, table):
    reading(table)
    q, k, v = _inputs(grad=False)
    looks = []
    monkeypatch.setattr(_attention, "_looked_at", lambda *given, original=_attention._looked_at: looks.append(given[-1]) or original(*given))
    _attention._RECENT.clear()
    for turn in range(3):
        for options in (dict(scale=float("0.25")), dict(scale=np.float64(0.5)), dict(window=(int("300"), 0)), dict(pattern="".join(["cau", "sal"])), {}):
            rt.attention(*(t.clone() for t in (q, k, v)), **options)
        rt.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
        rt.attention(q[:, :5], k, v)
        rt.attention(torch.nn.Parameter(q), k, v)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rt.attention(q, k, v)
        assert len(looks) == 7
    for _ in range(2):
        rt.attention(q, k, v, window=[3, 3])
    assert len(looks) == 8
    for tokens in range(1, 400):  # more than are kept
        one = q[:1, :1].expand(1, tokens, 4, 16)
        assert torch.allclose(rt.attention(one, one, one), one, atol=1e-6)
        rt.attention(q, k, v, scale=0.125)  # is used all the time
    assert len(looks) == 8 + 399 + 1
    _attention._RECENT.clear()
    rt.attention(q, k, v)


@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
@pytest.mark.parametrize("options", [{}, dict(sinks=torch.zeros(4)), dict(ranks=2), dict(deterministic=False, device="cuda-emulated")])
def test_what_no_backward_used_goes_with_the_output(layout, options):
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = _inputs(layout, dtype)
        before = q * 1.0
        gone = weakref.ref(before)
        o = rt.attention(before, k, v, layout=layout, **options)
        assert o.requires_grad and gone() is not None
        del before, o
        assert gone() is None


def test_no_view_is_made_of_heads_before_tokens(monkeypatch):
    tensors = _inputs("bhsd")
    rt.attention(*tensors, causal=True, layout="bhsd").sum().backward()
    views = []
    monkeypatch.setattr(_execute, "swapped", lambda *given: views.append(given))
    o = rt.attention(*tensors, causal=True, layout="bhsd")
    o.sum().backward()
    assert o.is_contiguous() and not views
