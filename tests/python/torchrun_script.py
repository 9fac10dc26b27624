"""Run by torchrun: what the first page of the documentation shows."""

import weakref

import torch
import torch.distributed as dist

from ringspan.torch import Sharding, attention

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
q, k, v = (torch.randn(1, 100, 4, 32) for _ in range(3))

sharding = Sharding("zigzag", tokens=100, ranks=ranks)
local = [sharding.shard(t, rank=rank).requires_grad_() for t in (q, k, v)]
o = attention(*local, causal=True, group=dist.group.WORLD, sharding=sharding)
whole = sharding.unshard(o, group=dist.group.WORLD)
whole.sum().backward()

expected = attention(q, k, v, causal=True)
assert (whole - expected).abs().max() < 1e-5
if rank == 0:
    print(f"{ranks} ranks agree")
torch.optim.AdamW(local).step()  # imports more of torch
dist.barrier()
gone = weakref.ref(dist.group.WORLD)
dist.destroy_process_group()
assert gone() is None, "the group outlives its end, and its threads may meet the end of the interpreter"
