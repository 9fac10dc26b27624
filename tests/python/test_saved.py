"""What backward needs of forward besides tensors: kept in the tensor that autograd has, wherever that lies."""

import pytest
import torch

import ringspan.torch as rt
from ringspan.errors import InvalidArgument
from ringspan.torch import _device


def _two_layers():
    """o and the gradients of two layers that run both forward passes first; o is kept in float32."""
    generator = torch.Generator().manual_seed(3)
    layers, results = [], []
    for _ in range(2):
        q, k, v, d_out = (torch.randn(1, 37, 2, 16, generator=generator).bfloat16() for _ in range(4))
        layers.append(([t.requires_grad_() for t in (q, k, v)], d_out))
    outputs = [rt.attention(*inputs, causal=True) for inputs, _ in layers]
    for (inputs, d_out), o in zip(layers, outputs):
        o.backward(d_out)
        results += [o.detach(), *(t.grad for t in inputs)]
    return results


def _keep_in(monkeypatch, empty):
    """empty(count): memory for what is kept."""
    makers = lambda place: lambda size, strides, dtype: empty(*size) if dtype == torch.uint8 else torch.empty_strided(size, strides, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(_device.Place, "empty", property(makers, lambda place, empty: None), raising=False)


@pytest.mark.parametrize("bytes_off", [4, 64])
def test_memory_of_any_alignment_gives_the_same_bits(monkeypatch, bytes_off):
    expected = _two_layers()
    given = []
    _keep_in(monkeypatch, lambda count: given.append(count) or torch.empty(count + bytes_off, dtype=torch.uint8)[bytes_off:])
    assert all(map(torch.equal, _two_layers(), expected))
    assert given == [37 * 2 * 16 * 4] * 2


def test_memory_of_another_size_is_refused(monkeypatch):
    for count in (0, 64):
        _keep_in(monkeypatch, lambda _, count=count: torch.empty(count, dtype=torch.uint8))
        with pytest.raises(InvalidArgument, match=f"saved has {count} bytes, but the plan keeps 4736"):
            _two_layers()
