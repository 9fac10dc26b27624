"""What people get wrong, and what they are told."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import ringspan
import ringspan.torch as rt

X = torch.ones(2, 8, 4, 16)


@pytest.mark.parametrize(
    "change, error, text",
    [
        (dict(attn_mask=None), TypeError, "give pattern="),
        (dict(is_causal=True), TypeError, "causal="),
        (dict(softmax_scale=1.0), TypeError, "scale="),
        (dict(window_size=(1, 1)), TypeError, "window=(left, right)"),
        (dict(causl=True), TypeError, "did you mean 'causal'"),
        (dict(strateg="ring"), TypeError, "did you mean 'strategy'"),
        (dict(layout="sbhd"), ValueError, "bshd, bhsd, thd"),
        (dict(layout="thd"), ValueError, "4 dimensions; layout 'thd' needs 3"),
        (dict(window=5), ValueError, "pair (left, right)"),
        (dict(window=(-2, 0)), ValueError, ">= -1"),
        (dict(pattern="casual"), ValueError, "casual"),
        (dict(pattern="documents"), ValueError, "cu_seqlens must be given"),
        (dict(cu_seqlens=[0, 9]), ValueError, "cu_seqlens"),
        (dict(cu_seqlens=[0.5]), ValueError, ""),
        (dict(cu_seqlens_k=[0, 8]), ValueError, "without cu_seqlens"),
        (dict(dropout_p=1.0), ValueError, "dropout_p (1.0)"),
        (dict(dropout_p="x"), ValueError, "must be a number"),
        (dict(scale=0.0), ValueError, "scale (0)"),
        (dict(scale=1e-46), ValueError, "scale (1e-46) must not be 0 in float32"),
        (dict(softcap=1e-46), ValueError, "softcap (1e-46) must not be 0 in float32"),
        (dict(softcap=1e-39), ValueError, "softcap (1e-39) must be 0, or finite and at least 1.1754944e-38"),
        (dict(softcap=1e39), ValueError, "softcap (inf) must be 0, or finite"),
        (dict(ranks=0), ValueError, "ranks (0)"),
        (dict(ranks=2, sharding="zigzak"), ValueError, "zigzak"),
        (dict(ranks=2, sharding=rt.Sharding("zigzag", tokens=9, ranks=2)), ValueError, "9 tokens"),
        (dict(ranks=2, strategy="rings"), ValueError, "rings"),
        (dict(group=object()), ValueError, "process group"),
        (dict(sinks=torch.ones(3)), ValueError, "(3,)"),
        (dict(alibi_slopes=torch.ones(3)), ValueError, "(3,)"),
        (dict(alibi_slopes=torch.ones(1, 4)), ValueError, "(1, 4); expected (4,) or (2, 4)"),
        (dict(alibi_slopes=torch.ones(4, requires_grad=True)), ringspan.Unsupported, "alibi_slopes.requires_grad is True"),
        (dict(deterministic="yes"), ValueError, "deterministic"),
        (dict(causal="top_left"), ValueError, "causal ('top_left') must be True or False; pattern='causal@top_left'"),
        (dict(causal=None), ValueError, "causal (None) must be True or False"),
        (dict(pattern="causal|window:1,0"), ValueError, "must be a text without '|'; its terms are joined by '&'"),
        (dict(window=(True, False)), ValueError, "pair (left, right) of integers"),
        (dict(window=(1.5, 0)), ValueError, "pair (left, right) of integers"),
        (dict(return_lse="no"), ValueError, "return_lse ('no') must be True or False"),
        (dict(sinks=torch.ones(X.shape[2], dtype=torch.complex64)), ValueError, "sinks (torch.complex64) must be real"),
        (dict(memory_budget="4GB"), ValueError, "memory_budget ('4GB') must be an integer of at least 0"),
        (dict(memory_budget=None), ValueError, "memory_budget (None) must be an integer"),
        (dict(bucket_rows=1.5), ValueError, "bucket_rows (1.5) must be an integer"),
        (dict(deadline=-1), ValueError, "deadline (-1.0) must be positive"),
        (dict(deadline=float("nan")), ValueError, "deadline (nan) must be positive"),
        (dict(lengths=5), ValueError, "lengths (5) must be a list of integers"),
        (dict(lengths=torch.ones(2, dtype=torch.bool)), ValueError, "lengths (torch.bool"),
        (dict(cu_seqlens=["a"]), ValueError, "cu_seqlens[0] ('a') must be an integer"),
        (dict(cu_seqlens=[0, 5.7, 8]), ValueError, "cu_seqlens[1] (5.7) must be an integer"),
        (dict(dropout_p=0.1, dropout_seed=-1), ValueError, "dropout_seed (-1) must be in [0, 2^64)"),
        (dict(dropout_p=0.1, dropout_seed=2**64), ValueError, "must be in [0, 2^64)"),
        (dict(dropout_p=0.1, dropout_seed=1.7), ValueError, "dropout_seed (1.7) must be an integer"),
        (dict(dropout_seed="a"), ValueError, "dropout_seed ('a') must be an integer"),
        (dict(strategy="ring"), ValueError, "strategy ('ring') is for several ranks: give group="),
        (dict(strategy="rong"), ValueError, "unknown strategy 'rong'"),
        (dict(strategy=None), ValueError, "strategy (None) must be a text"),
        (dict(ranks=1, strategy="rong"), ValueError, "unknown strategy 'rong'"),
        (dict(sharding="zigzak"), ValueError, "zigzak"),
        (dict(sharding=rt.Sharding("zigzag", tokens=8, ranks=2)), ValueError, "8 tokens over 2 ranks, but q has 8 tokens on one: give group="),
        (dict(sharding=rt.Sharding("zigzag", tokens=9, ranks=1)), ValueError, "9 tokens over 1 ranks, but q has 8 tokens"),
        (dict(scaling=1.0), TypeError, "it is scale= here"),
        (dict(ranksx=2), TypeError, "no argument 'ranksx'; did you mean 'ranks'?"),
        (dict(key_padding_mask=None), TypeError, "lengths="),
        (dict(block_mask=None), TypeError, "pattern="),
        (dict(partials="half"), ValueError, "partials ('half') must be 'float32' or 'storage'"),
        (dict(partials="storage"), ringspan.Unsupported, "partials 'storage' are those of a library's fused attention on a device"),
        (dict(kernel="fast"), ValueError, "fast"),
        (dict(device="gpu"), ValueError, "unknown device 'gpu': expected cpu, cuda, cuda:INDEX or cuda-emulated"),
        (dict(device="cuda:0"), ValueError, "device is cuda:0, but q is on cpu; tensors are not moved"),
        (dict(device=0), ValueError, "device (0) must be the name of a device"),
        (dict(device="cuda-emulated", kernel="reference"), ringspan.Unsupported, "computes on cuda, whose kernels are 'own', 'mma', 'wgmma', 'cudnn', 'flash_attn' and 'flash_attn_3'"),
    ],
)
def test_arguments(change, error, text):
    with pytest.raises(error) as caught:
        rt.attention(X, X, X, **change)
    assert isinstance(caught.value, ringspan.Error)
    assert text in str(caught.value), str(caught.value)


def test_the_name_that_holds_unknown_arguments_is_none():
    with pytest.raises(ringspan.UnknownArgument) as caught:
        rt.attention(X, X, X, unknown=1)
    assert str(caught.value) == "attention() has no argument 'unknown'"


@pytest.mark.parametrize(
    "q, k, v, error, text",
    [
        (X.double(), X, X, ringspan.Unsupported, "float64"),
        (X, X.bfloat16(), X, ValueError, "k.dtype (torch.bfloat16) must equal q.dtype"),
        (X, X[..., :8], X, ValueError, "k.head_dim (8) must equal q.head_dim (16)"),
        (X, X[:, :5], X, ValueError, "v.tokens (8) must equal k.tokens (5)"),
        (X, X[:, :, :2], X, ValueError, "v.heads (4) must equal k.heads (2)"),
        (X, X[:, :, :3], X[:, :, :3], ValueError, "multiple of k.heads (3)"),
        (X, X[:1], X[:1], ValueError, "k.batch (1) must equal q.batch (2)"),
        (X[0], X[0], X[0], ValueError, "3 dimensions"),
        (X.numpy(), X, X, ValueError, "ringspan.attention"),
        (X.expand(2, 8, 4, 16).repeat(1, 1, 1, 20), X.repeat(1, 1, 1, 20), X, ringspan.Error, "head_dim"),
    ],
)
def test_tensors(q, k, v, error, text):
    with pytest.raises(error) as caught:
        rt.attention(q, k, v)
    assert isinstance(caught.value, ringspan.Error)
    assert text in str(caught.value), str(caught.value)


@pytest.mark.parametrize("change", [
    dict(pattern="casual"), dict(pattern="documents"), dict(pattern="window:1,1", window=(2, 2)), dict(sharding="zigzak"), dict(sharding=5),
    dict(strategy="rong"), dict(ranks=2, sharding_k="zigzak"), dict(scale="x"),
])  # fmt: skip
def test_arguments_of_compiled_functions(change):
    """As without a compiler; the whole of a graph ends in torch's error, which tells ours."""
    with pytest.raises(ringspan.InvalidArgument) as plain:
        rt.attention(X, X, X, **change)
    torch._dynamo.reset()
    with pytest.raises(ringspan.InvalidArgument) as compiled:
        torch.compile(lambda x: rt.attention(x, x, x, **change), backend="eager")(X)
    assert str(compiled.value) == str(plain.value)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="InvalidArgument"):
        torch.compile(lambda x: rt.attention(x, x, x, **change), backend="eager", fullgraph=True)(X)


def test_tensors_elsewhere_are_refused_by_name():
    class Elsewhere:
        type = "cuda"

        def __str__(self):
            return "cuda:0"

    class OnDevice(torch.Tensor):
        device = Elsewhere()

    x = X.as_subclass(OnDevice)
    with pytest.raises(ringspan.InvalidArgument, match="k is on cpu, but q is on cuda:0"):
        rt.attention(x, X, X)
    if not ringspan._core.HAS_CUDA:
        with pytest.raises(ringspan.Unsupported, match="built without CUDA.*pip install . -C cmake.define.RINGSPAN_CUDA=ON"):
            rt.attention(x, x, x)
    Elsewhere.type = "xpu"
    with pytest.raises(ringspan.Unsupported, match="q is on cuda:0; ringspan computes on CPU and CUDA tensors"):
        rt.attention(x, x, x)


def test_other_kinds_of_tensors_are_refused_by_name():
    nested = torch.nested.nested_tensor([torch.ones(3, 4, 16), torch.ones(5, 4, 16)], layout=torch.jagged)
    with pytest.raises(ringspan.Unsupported, match="cu_seqlens="):
        rt.attention(nested, nested, nested)
    padded = torch.nested.nested_tensor([torch.ones(3, 4, 16), torch.ones(5, 4, 16)], layout=torch.strided)
    with pytest.raises(ringspan.Unsupported, match="q is nested.*cu_seqlens="):
        rt.attention(padded, padded, padded)
    with pytest.raises(ringspan.Unsupported, match="layout torch.sparse_coo"):
        rt.attention(X.to_sparse(), X, X)
    torch._dynamo.reset()
    with pytest.raises(ringspan.Unsupported, match="q is nested.*cu_seqlens="):
        torch.compile(rt.attention, backend="eager")(nested, nested, nested)


def test_errors_are_python_errors_too():
    assert issubclass(ringspan.InvalidArgument, ValueError)
    assert issubclass(ringspan.Unsupported, NotImplementedError)
    assert issubclass(ringspan.CommError, RuntimeError)
    assert issubclass(ringspan.OutOfBudget, MemoryError)


def test_numbers_of_numpy_are_numbers():
    expected = rt.attention(X, X, X, window=(3, 0), scale=0.5, cu_seqlens=None)
    assert torch.equal(rt.attention(X, X, X, window=(np.int64(3), np.int64(0)), scale=np.float32(0.5), causal=np.bool_(False)), expected)
    assert torch.equal(rt.attention(X, X, X, window=(3, 2**63 - 1)), rt.attention(X, X, X, window=(3, -1)))


def test_one_rank_may_be_said():
    sharding = rt.Sharding("zigzag", tokens=8, ranks=1)
    assert torch.equal(rt.attention(X, X, X, sharding=sharding, strategy="local"), rt.attention(X, X, X))


def test_second_derivatives_are_refused():
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    o = rt.attention(q, q, q, causal=True)
    (g,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(ringspan.Unsupported, match="gradient of a gradient"):
        g.square().sum().backward()
    with pytest.raises(ringspan.Unsupported, match="gradient of a gradient"):
        torch.autograd.functional.hessian(lambda x: rt.attention(x, x, x).square().sum(), q.detach())
    o = rt.attention(q, q, q)
    torch.autograd.grad(o.sum(), q, create_graph=True)  # a graph that nobody goes back through is no error


def test_forward_mode_is_refused():
    q = torch.randn(1, 8, 2, 8)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(ringspan.Unsupported, match="v has a tangent"):
            rt.attention(q, q, dual)
        assert torch.isfinite(rt.attention(q, q, q)).all()  # a constant in the middle of it
        slopes = torch.ones(2)
        with pytest.raises(ringspan.Unsupported, match="alibi_slopes has a tangent"):
            rt.attention(q, q, q, alibi_slopes=forward_ad.make_dual(slopes, slopes))
    with pytest.raises(ringspan.Unsupported, match="alibi_slopes is inside of torch.func.grad"):
        torch.func.jvp(lambda s: rt.attention(q, q, q, alibi_slopes=s).sum(), (slopes,), (slopes,))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("which", [0, 1])
def test_forward_mode_of_backward_is_refused(which, compiled):
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    function = lambda x: rt.attention(x, x, x, return_lse=True)  # noqa: E731
    output = (torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function)(q)[which]
    ones = torch.ones_like(output)
    name = ("the gradient of o", "the gradient of lse")[which]
    with forward_ad.dual_level(), pytest.raises(ringspan.Unsupported, match=f"{name} has a tangent"):
        torch.autograd.grad(output, q, grad_outputs=forward_ad.make_dual(ones, ones), retain_graph=True)
    assert torch.isfinite(torch.autograd.grad(output, q, grad_outputs=ones, retain_graph=True)[0]).all()
    if not compiled:
        with pytest.raises(ringspan.Unsupported, match=f"{name} is inside of torch.func.grad"):
            torch.func.jvp(lambda g: torch.autograd.grad(output, q, grad_outputs=g)[0], (ones,), (ones,))


@pytest.mark.parametrize("transform", ["grad", "vjp", "jvp", "jacrev", "per sample"])
def test_transforms_of_derivatives_are_refused(transform):
    q = torch.randn(3, 8, 2, 8)

    def body(x):
        return rt.attention(x[None], q[:1], q[:1]).sum()

    calls = {
        "grad": lambda: torch.func.grad(body)(q[0]),
        "vjp": lambda: torch.func.vjp(body, q[0])[1](torch.ones(())),
        "jvp": lambda: torch.func.jvp(body, (q[0],), (q[1],)),
        "jacrev": lambda: torch.func.jacrev(body)(q[0]),
        "per sample": lambda: torch.vmap(torch.func.grad(body))(q),
    }
    with pytest.raises(ringspan.Unsupported, match="q is inside of torch.func.grad"):
        calls[transform]()
    assert torch.equal(torch.vmap(lambda x: rt.attention(x[None], x[None], x[None]))(q)[:, 0], rt.attention(q, q, q))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize("transform", ["dual", "jvp", "grad"])
def test_derivatives_without_a_rule_are_refused_in_compiled_functions(transform, fullgraph):
    q = torch.randn(1, 8, 2, 8)

    def body(x):
        return rt.attention(x, q, q).sum()

    def dual(x):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(body(forward_ad.make_dual(x, q))).tangent

    calls = {"dual": dual, "jvp": lambda x: torch.func.jvp(body, (x,), (q,))[1], "grad": lambda x: torch.func.grad(body)(x)}
    torch._dynamo.reset()
    with pytest.raises(Exception, match="q has a tangent" if transform == "dual" else "q is inside of torch.func.grad") as caught:
        torch.compile(calls[transform], backend="aot_eager", fullgraph=fullgraph and transform != "dual")(q)
    assert fullgraph or isinstance(caught.value, ringspan.Unsupported), repr(caught.value)


def test_a_compiled_function_refuses_a_tangent_from_outside():
    q, slopes = torch.randn(1, 8, 2, 8), torch.ones(2)
    biased = torch.compile(lambda s: rt.attention(q, q, q, alibi_slopes=s), backend="aot_eager", fullgraph=True)
    with forward_ad.dual_level(), pytest.raises(ringspan.Unsupported, match="alibi_slopes has a tangent"):
        biased(forward_ad.make_dual(slopes, slopes))
    function = torch.compile(lambda x: rt.attention(x, x, x), backend="aot_eager", fullgraph=True)
    with forward_ad.dual_level(), pytest.raises(ringspan.Unsupported, match="q has a tangent"):
        function(forward_ad.make_dual(q, q))


def test_attention_of_constants_inside_of_a_transform():
    q, y = torch.randn(1, 8, 2, 8), torch.tensor(2.0)
    total = rt.attention(q, q, q).sum()

    def body(y):
        constant = (q + 0 * y).detach()
        return rt.attention(constant, constant, constant).sum() * y

    assert torch.equal(torch.func.grad(body)(y), total)
    assert torch.equal(torch.func.jvp(body, (y,), (torch.ones(()),))[1], total)


def test_slopes_that_require_a_gradient_are_refused_under_vmap():
    slopes = torch.ones(3, 2, requires_grad=True)
    q = torch.randn(1, 8, 2, 8)
    with pytest.raises(ringspan.Unsupported, match="alibi_slopes.requires_grad"):
        torch.vmap(lambda s: rt.attention(q, q, q, alibi_slopes=s))(slopes)


@pytest.mark.parametrize("empty", [[], (), torch.empty(0, dtype=torch.int64)])
@pytest.mark.parametrize("name", ["lengths", "lengths_k", "starts_k", "cu_seqlens_k"])
def test_a_list_without_entries_is_not_left_out(name, empty):
    more = {"cu_seqlens": [0, 8]} if name == "cu_seqlens_k" else {}
    expected = 2 if more else X.shape[0]
    with pytest.raises(ValueError, match=f"{name} has 0 entries, expected {expected}"):
        rt.attention(X, X, X, **{name: empty}, **more)
    with pytest.raises(ValueError, match=f"{name} has 0 entries, expected {expected}"):
        ringspan.plan(8, batch=X.shape[0], **{name: empty}, **more)
    if not more:  # a batch of nothing
        assert rt.attention(X[:0], X[:0], X[:0], **{name: empty}).shape == X[:0].shape


def test_devices_of_plans_are_those_of_calls():
    assert ringspan.plan(8, device="cuda:1") == ringspan.plan(8, device="cuda")
    for device in ("cudaxyz", "cuda:x", "cuda:"):
        with pytest.raises(ValueError, match=f"unknown kind of device '{device}'"):
            ringspan.plan(8, device=device)


def test_arrays_are_refused_as_tensors_are():
    x = np.ones((1, 6, 2, 8), np.float32)
    for options, text in [
        (dict(strategy="ring"), r"strategy \('ring'\) is for several ranks: give ranks="),
        (dict(strategy="rong"), "unknown strategy 'rong'"),
        (dict(sharding="zag"), "unknown sharding 'zag'"),
        (dict(alibi_slopes=[1j, 1j]), "alibi_slopes is complex"),
    ]:
        with pytest.raises(ValueError, match=text):
            ringspan.attention(x, x, x, **options)
    o, lse = ringspan.attention(x, x, x, return_lse=True)
    with pytest.raises(ValueError, match="dlse is complex"):
        ringspan.attention_backward(o, x, x, x, o, lse, dlse=lse * 1j)
    nothing = x[:0]
    o, lse = ringspan.attention(nothing, nothing, nothing, return_lse=True)
    assert (o.shape, lse.shape) == ((0, 6, 2, 8), (0, 2, 6))
    sinks = np.ones(2, np.float32)
    gradients = ringspan.attention_backward(o, nothing, nothing, nothing, o, lse, sinks=sinks)
    assert [g.shape for g in gradients] == [nothing.shape] * 3 + [(2,)]
    assert not gradients[3].any()


def test_lengths_of_queries_are_not_taken_for_those_of_other_keys():
    q = X[:, :4]
    with pytest.raises(ValueError, match=r"lengths are given, but lengths_k are not, and q has 4 tokens and k 8"):
        rt.attention(q, X, X, lengths=[4] * X.shape[0])
    rt.attention(q, X, X, lengths=[4] * X.shape[0], lengths_k=[8] * X.shape[0])
    with pytest.raises(ValueError, match=r"lengths are given, but lengths_k are not, and q has 4 tokens and k 8"):
        ringspan.plan(4, tokens_k=8, lengths=[4])
