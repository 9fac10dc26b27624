"""Attention with a pattern: on one rank, on four simulated ones, and planned for 1,024."""

import torch

from ringspan.torch import attention, plan

torch.manual_seed(0)
q = torch.randn(1, 1000, 8, 64, requires_grad=True)  # (batch, tokens, heads, head_dim); any number of tokens
k, v = (torch.randn(1, 1000, 2, 64, requires_grad=True) for _ in range(2))  # GQA: 4 query heads read one kv head

o = attention(q, k, v, pattern="causal & window:255,0")
gradients = torch.autograd.grad(o.square().sum(), (q, k, v))

# The same call as four ranks compute it, in threads of this process: the same result, up to float32 rounding.
o_4 = attention(q, k, v, pattern="causal & window:255,0", ranks=4)
gradients_4 = torch.autograd.grad(o_4.square().sum(), (q, k, v))
difference = max((a - b).abs().max().item() for a, b in zip((o, *gradients), (o_4, *gradients_4)))
print(f"o {tuple(o.shape)}; 4 ranks differ from 1 by at most {difference:.1e}")

# torch's own, with the mask written out.
i, j = torch.arange(1000)[:, None], torch.arange(1000)[None]
mask = (j <= i) & (j >= i - 255)
expected = torch.nn.functional.scaled_dot_product_attention(
    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, enable_gqa=True
)
print(f"torch differs by at most {(o - expected.transpose(1, 2)).abs().max().item():.1e}")

# Who would compute, send and keep what, with a million tokens on 1,024 ranks.
million = plan(1_000_000, ranks=1024, rank=7, heads=8, kv_heads=2, pattern="causal & window:4095,0")
senders = sum(received > 0 for _, received in million.traffic())
print(f"a million tokens over 1,024 ranks, {million.strategy}: rank 7 computes {million.pairs:,} pairs, {senders} others send to it")
