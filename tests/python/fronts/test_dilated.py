"""fkodom's DilatedAttention and MultiheadDilatedAttention: their constructors and state, our numbers."""

import inspect

import pytest
import torch

import dense
from ringspan import Unsupported
from ringspan.fronts.dilated import DilatedAttention, MultiheadDilatedAttention

B, H, D = 2, 5, 8  # 5 heads in groups of 3 and 2


def head_groups(q, k, v, segments, rates, causal=False, scale=None):
    """From the definition: heads are cut into groups, group b attends by branch b, the rest of its rows is 0; all over branches."""
    n, heads, branches = q.shape[1], q.shape[2], len(segments)
    position = torch.arange(n)
    out, first = [], 0
    for b, (w, r) in enumerate(zip(segments, rates)):
        size = heads // branches + (b < heads % branches)
        inside = (position[:, None] // w == position[None] // w) & (position[:, None] % w % r == b % r) & (position[None] % w % r == b % r)
        if causal:
            inside &= position[:, None] >= position[None]
        group = slice(first, first + size)
        out.append(dense.attention(q[:, :, group], k[:, :, group], v[:, :, group], inside, scale=scale)[0])
        first += size
    return torch.cat(out, dim=2) / branches, None


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [24, 21])
def test_dilated_attention(causal, n):
    q, k, v = dense.tensors((B, n, H, D), (B, n, H, D), (B, n, H, D))
    module = DilatedAttention([6, 12], [1, 3], softmax_scale=0.25)
    out = module(q, k, v, is_causal=causal)
    dense.check(out, (q, k, v), lambda *x: head_groups(*x, [6, 12], [1, 3], causal, 0.25), name=f"{n} {causal}")


def test_multihead():
    torch.manual_seed(0)
    module = MultiheadDilatedAttention(40, 5, [1, 3], [6, 12])
    names = [f"{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj", "norm", "out_proj") for kind in ("weight", "bias")]
    assert sorted(module.state_dict()) == sorted(names)  # a state_dict of the original loads
    (x,) = dense.tensors((B, 24, 40))
    out, weights = module(x, x, x, is_causal=True)
    assert weights is None

    def reference(x):
        double = {name: value.double() for name, value in module.state_dict().items()}

        def linear(name, x):
            return torch.nn.functional.linear(x, double[f"{name}.weight"], double[f"{name}.bias"])

        q, k, v = (linear(name, x).reshape(B, 24, 5, 8) for name in ("q_proj", "k_proj", "v_proj"))
        x, _ = head_groups(q, k, v, [6, 12], [1, 3], causal=True)
        x = torch.nn.functional.layer_norm(x.reshape(B, 24, 40), (40,), double["norm.weight"], double["norm.bias"], 1e-5)
        return linear("out_proj", x), None

    dense.check(out, (x,), reference, name="multihead", tolerance=1e-4)


def test_signatures():
    parameters = inspect.signature(DilatedAttention).parameters
    assert list(parameters)[:5] == ["segment_lengths", "dilation_rates", "softmax_scale", "attention_dropout", "op"]
    parameters = inspect.signature(MultiheadDilatedAttention).parameters
    assert list(parameters)[:12] == ["embed_dim", "num_heads", "dilation_rates", "segment_lengths", "dropout", "bias", "layer_norm",
                                     "layer_norm_eps", "gamma_init", "device", "dtype", "op"]  # fmt: skip
    assert list(inspect.signature(MultiheadDilatedAttention.forward).parameters) == ["self", "query", "key", "value", "is_causal"]


def test_dropout_only_in_training():
    q, k, v = (t.detach() for t in dense.tensors((B, 24, H, D), (B, 24, H, D), (B, 24, H, D)))
    module = DilatedAttention([6, 12], [1, 3], attention_dropout=0.5)
    assert not torch.equal(module(q, k, v), module(q, k, v))
    module.eval()
    assert torch.equal(module(q, k, v), module(q, k, v))


def test_refusals():
    with pytest.raises(ValueError):
        DilatedAttention([6, 12], [1])
    with pytest.raises(ValueError):
        MultiheadDilatedAttention(40, 5, [1, 3], [6])
    with pytest.raises(ValueError, match="divisible"):
        MultiheadDilatedAttention(41, 5, [1, 3], [6, 12])
    with pytest.raises(Unsupported, match="xformers"):
        DilatedAttention([6], [1], op=object())
