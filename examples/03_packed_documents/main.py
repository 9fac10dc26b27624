"""Packed documents over ranks: one document changes, the others' outputs do not."""

import torch
import torch.distributed as dist

from ringspan.torch import Sharding, attention

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.group.WORLD
cu_seqlens = torch.tensor([0, 300, 301, 777, 1000], dtype=torch.int32)  # four documents
sharding = Sharding("zigzag", tokens=1000, ranks=dist.get_world_size())
torch.manual_seed(0)
q, k, v = torch.randn(3, 1000, 4, 32)  # layout thd: (tokens, heads, head_dim)


def run(q, k, v):
    local = (sharding.shard(t, rank=rank, dim=0) for t in (q, k, v))
    o = attention(*local, causal=True, cu_seqlens=cu_seqlens, group=group, sharding=sharding, layout="thd")
    return sharding.unshard(o, group=group, dim=0)


before = run(q, k, v)
k, v = k.clone(), v.clone()
k[301:777] += 1.0  # the third document
v[301:777] += 1.0
changed = (run(q, k, v) != before).flatten(1).any(1)

tokens = torch.arange(1000)[None]
labels = sharding.next_labels(tokens, rank=rank, cu_seqlens=cu_seqlens)
if rank == 0:
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        print(f"document [{begin}, {end}): {int(changed[begin:end].sum())} of {end - begin} outputs changed")
    print(f"rank 0 holds {labels.numel()} tokens, {int((labels < 0).sum())} of them without a next token")
dist.destroy_process_group()
