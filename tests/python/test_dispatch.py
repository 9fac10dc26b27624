"""attention() runs the ops with and without torch's dispatcher: the same results, and what has to see the op sees it."""

import contextlib
import functools

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import ringspan
import ringspan.torch as rt
from ringspan.torch import _execute, _ops


class _Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class _Nothing(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


def _inputs(n=24, dtype=torch.float32, grad=True, **where):
    torch.manual_seed(0)
    return [torch.randn(2, n, 4, 16, **where).to(dtype).requires_grad_(grad) for _ in range(3)]


@pytest.fixture
def op_calls(monkeypatch):
    """Which of the ways calls take."""
    calls = []
    monkeypatch.setattr(_ops, "_attend_alone", lambda *a, original=_ops._attend_alone: calls.append("alone") or original(*a))
    monkeypatch.setattr(_execute, "backward_alone", lambda *a, original=_execute.backward_alone: calls.append("backward alone") or original(*a))
    return calls


def _results(tensors, dispatched, dlse=False, **options):
    with _Ops() if dispatched else contextlib.nullcontext():
        o, lse = rt.attention(*tensors, return_lse=True, **options)
        leaves = [t for t in (*tensors, options.get("sinks")) if t is not None]
        grads = torch.autograd.grad(o.square().sum() + (lse.sum() if dlse else 0), leaves)
    return o.detach(), lse.detach(), *grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", [{}, dict(device="cuda-emulated")])
@pytest.mark.parametrize("options", [
    dict(causal=True), dict(layout="bhsd", causal=True, window=(5, 0)), dict(dropout_p=0.3, dropout_seed=3), dict(lengths=[3, 20]),
    dict(alibi_slopes=torch.ones(4)), dict(sinks=torch.zeros(4, requires_grad=True)), dict(ranks=2), dict(pattern="dilated:8x1,16x2@torchscale"),
    dict(causal=True, deterministic=False), dict(layout="bhsd", causal=True, deterministic=False), dict(layout="bhsd", sinks=torch.zeros(4, requires_grad=True)),
    dict(layout="bhsd", lengths=[3, 20]), dict(layout="bhsd", ranks=2), dict(layout="bhsd", alibi_slopes=torch.ones(2, 4)),
])  # fmt: skip
def test_both_ways_give_the_same_bits(dtype, where, options):
    tensors = _inputs(dtype=dtype)
    dlse = "deterministic" not in options or dtype == torch.float32 or not where
    if options.get("layout"):
        tensors = [t.detach().transpose(1, 2).requires_grad_() for t in tensors]
    ways = [_results(tensors, dispatched, dlse=dlse, **options, **where) for dispatched in (False, True)]
    for a, b in zip(*ways):
        assert a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)


def test_the_short_way_is_taken(op_calls):
    q, k, v = _inputs()
    rt.attention(q, k, v).sum().backward()
    with torch.inference_mode():
        rt.attention(q, k, v)
    rt.attention(torch.nn.Parameter(q), k, v)
    assert op_calls == ["alone", "backward alone", "alone", "alone"]
    op_calls.clear()
    with _Ops():
        rt.attention(q, k, v).sum().backward()
    assert not op_calls


def test_a_dispatch_mode_sees_the_ops():
    q, k, v = _inputs()
    with _Ops() as mode:
        rt.attention(q, k, v).sum().backward()
    assert [name for name in mode.names if "ringspan" in name] == ["ringspan.attention_forward.default", "ringspan.attention_backward.default"]
    o = rt.attention(q, k, v)
    with _Ops() as mode:
        o.sum().backward()
    assert [name for name in mode.names if "ringspan" in name] == ["ringspan.attention_backward.default"]


def test_tracers_see_the_ops():
    q, k, v = _inputs(grad=False)
    from torch.fx.experimental.proxy_tensor import make_fx

    graph = make_fx(lambda q: rt.attention(q, k, v))(q)
    assert "ringspan.attention_forward" in graph.code
    traced = torch.jit.trace(lambda q: rt.attention(q, k, v), (q,))
    assert "ringspan::attention_forward" in str(traced.graph)


def test_tensors_that_are_not_what_is_in_their_memory(op_calls):
    q, k, v = _inputs(grad=False)
    negated = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negated.is_neg() and torch.equal(negated, q)
    assert torch.equal(rt.attention(negated, k, v), rt.attention(q, k, v))
    zeros = torch._efficientzerotensor(q.shape)
    assert torch.equal(rt.attention(zeros, k, v), rt.attention(torch.zeros_like(q), k, v))


@pytest.mark.parametrize("kind", ["negated", "zeros", "expanded"])
def test_gradients_that_are_not_what_is_in_their_memory(kind):
    q, k, v = _inputs()
    o = rt.attention(q, k, v)
    given = {"negated": torch.complex(torch.zeros_like(o), -o.detach()).conj().imag, "zeros": torch._efficientzerotensor(o.shape),
             "expanded": torch.ones(1, 1, 1, 1).expand_as(o)}[kind]  # fmt: skip
    plain = {"negated": o.detach(), "zeros": torch.zeros_like(o), "expanded": torch.ones_like(o)}[kind]
    a = torch.autograd.grad(o, (q, k, v), given, retain_graph=True)
    b = torch.autograd.grad(o, (q, k, v), plain)
    assert all(torch.equal(x, y) for x, y in zip(a, b))


def test_a_subclass_stays_one():
    class Named(torch.Tensor):
        pass

    q, k, v = _inputs(grad=False)
    assert type(rt.attention(q.as_subclass(Named), k, v)) is Named
    assert type(rt.attention(torch.nn.Parameter(q), k, v)) is torch.Tensor


def test_below_autograd_there_is_no_graph():
    q, k, v = _inputs()
    with torch._C._AutoDispatchBelowAutograd():
        assert rt.attention(q, k, v).grad_fn is None
    assert rt.attention(q, k, v).grad_fn is not None
    with torch.inference_mode():
        assert rt.attention(q, k, v).is_inference()
    with torch.no_grad():
        assert not rt.attention(q, k, v).requires_grad


def test_a_gradient_of_a_gradient_is_refused():
    q, k, v = _inputs()
    (dq,) = torch.autograd.grad(rt.attention(q, k, v).square().sum(), q, create_graph=True)
    with pytest.raises(ringspan.Unsupported, match="gradient of a gradient"):
        dq.sum().backward()


def test_what_backward_reads_must_not_have_changed():
    q, k, v = _inputs()
    q = q * 1
    o = rt.attention(q, k, v)
    with torch.no_grad():
        q.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_that_computes_again_another_way(dtype, layout):
    q, k, v = _inputs(dtype=dtype)
    attend = functools.partial(rt.attention, layout=layout)
    expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    for first, second in ((contextlib.nullcontext, _Nothing), (_Nothing, contextlib.nullcontext)):
        with first():
            o = checkpoint(lambda q: attend(q, k, v), q, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), second()))
        got = torch.autograd.grad(o.sum(), (q, k, v))
        assert all(torch.equal(a, b) for a, b in zip(got, expected))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_hooks_of_saved_tensors(layout):
    q, k, v = _inputs(dtype=torch.bfloat16)
    attend = functools.partial(rt.attention, layout=layout)
    expected = torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))
    counts = []
    for dispatched in (False, True):
        packed = []
        with _Nothing() if dispatched else contextlib.nullcontext(), torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
            o = attend(q, k, v)
        counts.append([(t.shape, t.dtype) for t in packed])
        assert all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(o.sum(), (q, k, v)), expected))
    assert counts[0] == counts[1]


def test_what_was_right_does_not_make_what_is_equal_to_it_right():
    q, k, v = _inputs(grad=False)
    rt.attention(q, k, v, causal=True, memory_budget=0, softcap=0.0)
    for wrong in (dict(causal=1), dict(softcap=False), dict(memory_budget=False), dict(deterministic=1), dict(replicated_q=0), dict(host_tensors=0)):
        with pytest.raises(ringspan.InvalidArgument):
            rt.attention(q, k, v, **dict(dict(causal=True), **wrong))
    rt.attention(q, k, v, scale=1.0)
    with pytest.raises(ringspan.InvalidArgument, match="scale"):
        rt.attention(q, k, v, scale=True)
    with pytest.raises(ringspan.InvalidArgument, match="v.tokens"):
        rt.attention(q, k, v[:, :5])
    with pytest.raises(ringspan.InvalidArgument, match="k.dtype"):
        rt.attention(q, k.bfloat16(), v)


def test_a_default_device_and_autocast():
    q, k, v = _inputs()
    torch.set_default_device("cpu")
    try:
        rt.attention(q, k, v).sum().backward()
    finally:
        torch.set_default_device(None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = rt.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.sum().backward()


def test_threads_share_sessions():
    import threading

    tensors = _inputs()
    expected = torch.autograd.grad(rt.attention(*tensors).sum(), tensors)
    wrong = []

    def work():
        for _ in range(30):
            if not all(torch.equal(a, b) for a, b in zip(torch.autograd.grad(rt.attention(*tensors).sum(), tensors), expected)):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not wrong


def test_meta_and_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    meta = [torch.empty(2, 8, 4, 16, device="meta") for _ in range(3)]
    assert rt.attention(*meta).device.type == "meta"
    with FakeTensorMode():
        q = torch.empty(2, 8, 4, 16)
        assert rt.attention(q, q, q).shape == q.shape


def test_no_tensors_are_refused_by_name():
    q, k, v = _inputs(grad=False)
    for given, name in (((None, k, v), "q"), ((q, None, v), "k"), ((q, k, 3), "v"), ((q, k.numpy(), v), "k")):
        with pytest.raises(ringspan.InvalidArgument, match=f"{name} .* must be a torch.Tensor"):
            rt.attention(*given)
