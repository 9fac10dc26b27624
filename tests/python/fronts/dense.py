"""The reference of these tests: attention in float64 from its definition, every pair at once, gradients by autograd. Uses nothing of
ringspan."""

import math

import torch


def attention(q, k, v, seen=None, *, scale=None, softcap=0.0, bias=None, sinks=None):
    """(o, lse) of (batch, tokens, heads, dim) tensors; seen (.., tokens_q, tokens_k): how many times query i sees key j."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if seen is not None:
        scores = scores + seen.double().log()  # 0 times: -inf
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        v = torch.cat((v, torch.zeros_like(v[:, :, :1])), dim=2)
    nothing = torch.isneginf(scores).all(-1, keepdim=True)
    lse = scores.masked_fill(nothing, 0.0).logsumexp(-1, keepdim=True)
    p = (scores - lse).exp().masked_fill(nothing, 0.0)
    return (p @ v).transpose(1, 2), lse.masked_fill(nothing, float("-inf"))[..., 0]


def band(tokens_q, tokens_k, left=-1, right=-1, causal=False, top_left=False):
    """Who sees whom: [diagonal - left, diagonal + right], -1 without bound."""
    diagonal = 0 if top_left else tokens_k - tokens_q
    distance = torch.arange(tokens_k)[None] - torch.arange(tokens_q)[:, None] - diagonal
    seen = torch.ones(tokens_q, tokens_k, dtype=torch.bool)
    if causal:
        seen &= distance <= 0
    if left >= 0:
        seen &= distance >= -left
    if right >= 0:
        seen &= distance <= right
    return seen


def packed(offsets_q, offsets_k, **arguments):
    """band() in each document."""
    seen = torch.zeros(offsets_q[-1], offsets_k[-1], dtype=torch.bool)
    for a, b, c, d in zip(offsets_q, offsets_q[1:], offsets_k, offsets_k[1:]):
        seen[a:b, c:d] = band(b - a, d - c, **arguments)
    return seen


def tensors(*shapes, seed=0, dtype=torch.float32):
    """Normal random tensors that need gradients."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def close(name, got, expected, tolerance=3e-5):
    assert got.shape == expected.shape, f"{name}: {tuple(got.shape)} instead of {tuple(expected.shape)}"
    got, expected = got.detach().double(), expected.detach().double()
    same = got == expected  # -inf equals -inf
    error = (got - expected).abs().masked_fill(same, 0.0)
    limit = tolerance * max(1.0, expected.abs().masked_fill(same & expected.isinf(), 0.0).max().item() if expected.numel() else 1.0)
    assert bool((error <= limit).all()), f"{name}: off by {error.max().item():.3g}"


def check(output, inputs, reference, *, lse=None, name="", tolerance=3e-5):
    """Compares output (and lse) and the gradients of random weights of it with those of reference(*inputs in float64)."""
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    expected, expected_lse = reference(*doubles)
    close(f"{name} o", output, expected, tolerance)
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    value, expected_value = (output.float() * weight).sum(), (expected * weight.double()).sum()
    if lse is not None:
        close(f"{name} lse", lse, expected_lse, tolerance)
        weight = torch.randn(lse.shape, generator=torch.Generator().manual_seed(2))
        seen = ~torch.isinf(expected_lse)
        value = value + (lse[seen] * weight[seen]).sum()
        expected_value = expected_value + (expected_lse[seen] * weight.double()[seen]).sum()
    grads, expected_grads = torch.autograd.grad(value, inputs), torch.autograd.grad(expected_value, doubles)
    for index, (grad, expected_grad) in enumerate(zip(grads, expected_grads)):
        close(f"{name} gradient {index}", grad, expected_grad, tolerance)
