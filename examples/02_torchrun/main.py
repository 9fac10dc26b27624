"""One training step over the ranks of torchrun, and the same on one."""

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss

from ringspan.longnet import rotary
from ringspan.torch import Sharding, attention

dist.init_process_group("gloo")
rank, group = dist.get_rank(), dist.group.WORLD
tokens, heads, head_dim = 1001, 4, 32
torch.manual_seed(0)  # the same whole sequence and weights on every rank
x, target = torch.randn(2, 1, tokens, heads * head_dim)
layer = torch.nn.Linear(heads * head_dim, 3 * heads * head_dim)


def losses(x, target, positions, **where):
    q, k, v = layer(x).unflatten(-1, (3, heads, head_dim)).unbind(2)
    o = attention(rotary(q, positions), rotary(k, positions), v, causal=True, **where).flatten(-2)
    return mse_loss(o, target, reduction="none").mean(-1)


sharding = Sharding("zigzag", tokens=tokens, ranks=dist.get_world_size())
mine = [sharding.shard(t, rank=rank) for t in (x, target)]
loss = sharding.mean_loss(losses(*mine, sharding.positions(rank), group=group, sharding=sharding), group=group)
loss.backward()
dist.all_reduce(layer.weight.grad)  # a sum: the loss is a mean over all ranks' tokens
if rank == 0:
    print(f"{sharding}: loss {loss.item():.6f}, gradient {layer.weight.grad.norm().item():.6f}")
    layer.zero_grad()
    whole = losses(x, target, torch.arange(tokens)).mean()
    whole.backward()
    print(f"one process: loss {whole.item():.6f}, gradient {layer.weight.grad.norm().item():.6f}")
dist.destroy_process_group()
