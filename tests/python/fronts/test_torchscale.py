"""torchscale's DilatedAttention: its forward, and its gradients, whose merge weights are constants."""

import math
import types

import pytest
import torch

import dense
from ringspan import InvalidArgument, Unsupported
from ringspan.fronts.torchscale import DilatedAttention

B, N, H, D = 2, 24, 5, 8  # 5 heads and rate 2: residues by groups of 3 and 2


def arguments(**more):
    return types.SimpleNamespace(**{**dict(segment_length=[6, 12], dilated_ratio=[1, 2], multiway=False, xpos_rel_pos=False,
                                           layernorm_eps=1e-5, flash_attention=True, seq_parallel=False), **more})  # fmt: skip


def dilated(q, k, v, segments, rates, causal, detached):
    """Branch by branch, then the sum by softmax weights of the branches' log-sum-exp."""
    n, heads = q.shape[1], q.shape[2]
    position, head = torch.arange(n), torch.arange(heads)
    outs, lses = [], []
    for w, r in zip(segments, rates):
        residue = head // math.ceil(heads / r)
        at = position % w % r
        seen = position[:, None] // w == position[None] // w
        seen = seen & (at[:, None] == residue[:, None, None]) & (at[None] == residue[:, None, None])
        if causal:
            seen &= position[:, None] >= position[None]
        o, lse = dense.attention(q, k, v, seen)
        outs.append(o)
        lses.append(lse)
    weights = torch.softmax(torch.stack(lses), dim=0)
    weights = weights.detach() if detached else weights
    return sum(o * w.transpose(1, 2)[..., None] for o, w in zip(outs, weights))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dialect", ["torchscale", "longnet"])
def test_forward_and_gradients(causal, dialect):
    torch.manual_seed(0)
    chosen = {} if dialect == "torchscale" else dict(dialect=dialect)  # as the original, unless another is asked for
    module = DilatedAttention(arguments(), H * D, H, self_attention=True, subln=True, **chosen)
    names = [f"{part}.{kind}" for part in ("q_proj", "k_proj", "v_proj", "inner_attn_ln", "out_proj") for kind in ("weight", "bias")]
    assert sorted(module.state_dict()) == sorted(names)  # a state_dict of the original loads
    (x,) = dense.tensors((B, N, H * D))
    out, weights = module(x, x, x, is_causal=causal)
    assert weights is None
    parameters = [x, *module.parameters()]

    def linear(x, weight, bias):
        return torch.nn.functional.linear(x, weight, bias)

    def reference(x, *values):
        p = dict(zip([name for name, _ in module.named_parameters()], values))
        q, k, v = (linear(x, p[f"{name}.weight"], p[f"{name}.bias"]).reshape(B, N, H, D) for name in ("q_proj", "k_proj", "v_proj"))
        if dialect == "torchscale":
            x = dilated(q, k, v, [6, 12], [1, 2], causal, detached=True)
        else:
            x = longnet(q, k, v, [6, 12], [1, 2], causal)
        x = torch.nn.functional.layer_norm(x.reshape(B, N, H * D), (H * D,), p["inner_attn_ln.weight"], p["inner_attn_ln.bias"], 1e-5)
        return linear(x, p["out_proj.weight"], p["out_proj.bias"]), None

    dense.check(out, parameters, reference, name=f"{dialect} {causal}", tolerance=1e-4)


def longnet(q, k, v, segments, rates, causal):
    """One softmax over all branches, head h at residue h mod r."""
    position, head = torch.arange(N), torch.arange(H)
    seen = torch.zeros(H, N, N)
    for w, r in zip(segments, rates):
        residue, at = (head % r)[:, None, None], position % w % r
        seen += (position[:, None] // w == position[None] // w) & (at[:, None] == residue) & (at[None] == residue)
    if causal:
        seen *= position[:, None] >= position[None]
    return dense.attention(q, k, v, seen)[0]


def test_the_detached_gradient_is_another_one():
    """So that the test above could not pass with exact gradients."""
    q, k, v = [t.double() for t in dense.tensors((B, N, H, D), (B, N, H, D), (B, N, H, D))]
    (weight,) = dense.tensors((B, N, H, D), seed=5)
    grads = [torch.autograd.grad((dilated(q, k, v, [6, 12], [1, 2], True, detached) * weight).sum(), q)[0] for detached in (False, True)]
    assert (grads[0] - grads[1]).abs().max() > 0.1


def test_dropout_in_training_only():
    module = DilatedAttention(arguments(), H * D, H, dropout=0.5, self_attention=True)
    (x,) = dense.tensors((B, N, H * D))
    assert not torch.equal(module(x, x, x)[0], module(x, x, x)[0])
    module.eval()
    assert torch.equal(module(x, x, x)[0], module(x, x, x)[0])


def test_refusals():
    def make(**more):
        return DilatedAttention(arguments(**more), H * D, H, self_attention=True)

    x = torch.zeros(B, N, H * D)
    for name, value in (("incremental_state", {}), ("key_padding_mask", torch.zeros(B, N)), ("attn_mask", torch.zeros(N, N)),
                        ("rel_pos", torch.zeros(N, N))):  # fmt: skip
        with pytest.raises(Unsupported, match=name):
            make()(x, x, x, **{name: value})
    for name in ("multiway", "xpos_rel_pos"):
        with pytest.raises(Unsupported, match=name):
            make(**{name: True})
    with pytest.raises(ValueError, match="not initialized"):
        make(seq_parallel=True)(x, x, x)
    for strategy in ("nonsense", "ring"):
        with pytest.raises(InvalidArgument, match=f"strategy .*{strategy}"):
            DilatedAttention(arguments(), H * D, H, self_attention=True, strategy=strategy)(x, x, x)
    with pytest.raises(InvalidArgument, match=r"key has shape \(2, 24, 39\); expected \(batch, tokens, embed_dim = 40\)"):
        make()(x, x[..., 1:], x)
    with pytest.raises(InvalidArgument, match=r"is_causal \(1\) must be True or False"):
        make()(x, x, x, is_causal=1)
    with pytest.raises(ValueError, match="one of self_attention"):
        DilatedAttention(arguments(), H * D, H)
