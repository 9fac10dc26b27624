"""A model written for flash-attn and for ring-flash-attention: only the imports are Ringspan's."""

import torch
import torch.distributed as dist

from ringspan.fronts.flash_attn import flash_attn_func  # was: from flash_attn import ...
from ringspan.fronts.ring_flash_attn import zigzag_ring_flash_attn_func  # was: from ring_flash_attn import ...
from ringspan.torch import Sharding

heads, kv_heads, dim, tokens = 8, 2, 32, 512


class Block(torch.nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend
        self.qkv = torch.nn.Linear(heads * dim, (heads + 2 * kv_heads) * dim)
        self.out = torch.nn.Linear(heads * dim, heads * dim)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), dim=2)
        return x + self.out(self.attend(q, k, v, causal=True).flatten(2))


def step(attend, x):
    torch.manual_seed(1)  # the same weights each time
    block = Block(attend)
    losses = block(x).square().mean(-1)
    (losses.sum() / tokens).backward()
    return losses.detach().sum() / tokens, block.qkv.weight.grad


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(1, tokens, heads * dim)
whole = step(flash_attn_func, x)  # one process, all tokens
shared = step(zigzag_ring_flash_attn_func, Sharding("zigzag", tokens=tokens, ranks=ranks).shard(x, rank=rank))
for part in shared:
    dist.all_reduce(part)
if rank == 0:
    print(f"flash-attn's function: loss {whole[0]:.6f}, gradient {whole[1].norm():.6f}")
    print(f"ring-flash-attention's over {ranks} ranks: loss {shared[0]:.6f}, gradient {shared[1].norm():.6f}")
dist.destroy_process_group()
