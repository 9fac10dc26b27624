"""Attention in float64, dense, written from the definition: what the tests compare with."""

import torch


def mask_of(n_q, n_k, causal=False, window=None, top_left=False, cu_q=None, cu_k=None):
    """(n_q, n_k) booleans."""
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)[None, :]
    if cu_q is not None:
        cu_k = cu_q if cu_k is None else cu_k
        mask = torch.zeros(n_q, n_k, dtype=torch.bool)
        for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
            mask[q0:q1, k0:k1] = mask_of(q1 - q0, k1 - k0, causal, window, top_left)
        return mask
    diagonal = 0 if top_left else n_k - n_q
    mask = torch.ones(n_q, n_k, dtype=torch.bool)
    if causal:
        mask &= j - i <= diagonal
    if window is not None:
        left, right = window
        if left >= 0:
            mask &= j - i >= diagonal - left
        if right >= 0:
            mask &= j - i <= diagonal + right
    return mask


def dilated_counts(n, heads, branches, causal):
    """(heads, n, n): how many branches of LongNet show key j to query i."""
    counts = torch.zeros(heads, n, n, dtype=torch.float64)
    i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
    for h in range(heads):
        for w, r in branches:
            counts[h] += (i // w == j // w) & (i % w % r == h % r) & (j % w % r == h % r)
    return counts * (j <= i) if causal else counts


def attention(q, k, v, mask=None, counts=None, scale=None, softcap=0.0, alibi=None, sinks=None):
    """(o, lse) of (batch, tokens, heads, dim) in float64; rows without a key are 0 and -inf. Differentiable."""
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    n_q, n_k = s.shape[-2:]
    if alibi is not None:
        distance = (torch.arange(n_k)[None, :] - torch.arange(n_q)[:, None] - (n_k - n_q)).abs().double()
        slopes = alibi.double() if alibi.dim() == 2 else alibi.double()[None]
        s = s - slopes[:, :, None, None] * distance
    if counts is not None:
        s = s + counts.log()
    elif mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    empty = torch.isneginf(s).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(s.masked_fill(empty, 0.0), -1).masked_fill(empty[..., 0], -torch.inf)
    if sinks is not None:
        p = p[..., :-1]
    return torch.einsum("bhij,bjhd->bihd", p, v), lse


def bound(dtype):
    """A generous elementwise bound for inputs of unit variance; wrong results are off by orders more."""
    return {torch.float32: 3e-5, torch.bfloat16: 8e-2, torch.float16: 1e-2}[dtype]


def assert_close(actual, expected, dtype=torch.float32, what=""):
    finite = torch.isfinite(expected)
    assert torch.equal(torch.isneginf(actual.double()), torch.isneginf(expected.double())), f"{what}: -inf elsewhere"
    error = (actual.double() - expected.double())[finite].abs()
    scale = max(1.0, expected[finite].abs().max().item() if finite.any() else 1.0)
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= bound(dtype) * scale, f"{what}: off by {worst:.3g} (values up to {scale:.3g}, {dtype})"
    assert not torch.isnan(actual).any(), f"{what}: NaN"
