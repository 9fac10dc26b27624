"""What people get wrong, and what they are told."""

import pytest
import torch

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
        (dict(ranks=0), ValueError, "ranks (0)"),
        (dict(ranks=2, sharding="zigzak"), ValueError, "zigzak"),
        (dict(ranks=2, sharding=rt.Sharding("zigzag", tokens=9, ranks=2)), ValueError, "9 tokens"),
        (dict(ranks=2, strategy="rings"), ValueError, "rings"),
        (dict(ranks=2, group=object()), ValueError, "not both"),
        (dict(group=object()), ValueError, "process group"),
        (dict(sinks=torch.ones(3)), ValueError, "(3,)"),
        (dict(alibi_slopes=torch.ones(3)), ValueError, "(3,)"),
        (dict(deterministic="yes"), ValueError, "deterministic"),
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
    with pytest.raises(ringspan.Unsupported, match="layout torch.sparse_coo"):
        rt.attention(X.to_sparse(), X, X)


def test_errors_are_python_errors_too():
    assert issubclass(ringspan.InvalidArgument, ValueError)
    assert issubclass(ringspan.Unsupported, NotImplementedError)
    assert issubclass(ringspan.CommError, RuntimeError)
    assert issubclass(ringspan.OutOfBudget, MemoryError)
