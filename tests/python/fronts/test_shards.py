"""The extras `group` and `sharding` of fronts whose originals are local, and torchscale's seq_parallel."""

import types

import pytest
import torch
import torch.distributed as dist

import dense
import worlds
from ringspan import Error, InvalidArgument
from ringspan.fronts import dilated, flash_attn, sdpa, torchscale
from ringspan.torch import Sharding

N, H, HK, D = 22, 6, 2, 8


def compare(name, out, inputs, whole, expected, sharding, rank, dim=1):
    mine = sharding.positions(rank)
    dense.close(f"{name} o", out, expected.index_select(dim, mine))
    (weight,) = dense.tensors(expected.shape, seed=9)
    weight = weight.detach()
    want = torch.autograd.grad((expected * weight.to(expected.dtype)).sum(), whole)
    got = torch.autograd.grad((out * weight.index_select(dim, mine)).sum(), inputs)
    for index, (a, b) in enumerate(zip(got, want)):
        dense.close(f"{name} gradient {index}", a, b.index_select(dim, mine))


def everything(rank, p):
    group = dist.group.WORLD
    sharding = Sharding("zigzag", tokens=N, ranks=p)
    whole = dense.tensors((2, N, H, D), (2, N, HK, D), (2, N, HK, D))
    doubles = [t.detach().double().requires_grad_() for t in whole]
    q, k, v = (sharding.shard(t.detach(), rank=rank).requires_grad_() for t in whole)

    out = flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(5, 0), group=group)
    expected, _ = dense.attention(*doubles, dense.band(N, N, 5, causal=True))
    compare("flash_attn_func", out, (q, k, v), doubles, expected, sharding, rank)

    mask = (torch.arange(N) < torch.tensor([N, 13])[:, None])[:, None, None] & (dense.band(N, N, causal=True) | (torch.arange(N) < 4))
    local = [t.transpose(1, 2) for t in (q, k, v)]
    out = sdpa.scaled_dot_product_attention(*local, mask, enable_gqa=True, group=group).transpose(1, 2)
    expected, _ = dense.attention(*doubles, mask)
    compare("sdpa, mask", out, (q, k, v), doubles, expected, sharding, rank)
    out = sdpa.scaled_dot_product_attention(*local, is_causal=True, enable_gqa=True, group=group).transpose(1, 2)
    expected, _ = dense.attention(*doubles, dense.band(N, N, causal=True))
    compare("sdpa, causal", out, (q, k, v), doubles, expected, sharding, rank)

    try:  # a wrong argument of one rank is an error of all
        sdpa.scaled_dot_product_attention(*local, mask.float() if rank == 1 else mask, enable_gqa=rank != 1, group=group)
    except Error as error:
        assert "enable_gqa=True" in str(error), error
    else:
        raise AssertionError("must be refused")

    # The same module with and without ranks; that without is compared with float64 in test_dilated.py and test_torchscale.py.
    (x,) = dense.tensors((2, N, 40))
    torch.manual_seed(0)
    alone = dilated.MultiheadDilatedAttention(40, 5, [1, 3], [6, 12])
    ranked = dilated.MultiheadDilatedAttention(40, 5, [1, 3], [6, 12], group=group, sharding=sharding)
    ranked.load_state_dict(alone.state_dict())
    mine = sharding.shard(x.detach(), rank=rank).requires_grad_()
    compare("fkodom", ranked(mine, mine, mine, is_causal=True)[0], (mine,), (x,), alone(x, x, x, is_causal=True)[0], sharding, rank)

    args = dict(segment_length=[4, 20], dilated_ratio=[1, 2], layernorm_eps=1e-5)
    for causal in (False, True):
        alone = torchscale.DilatedAttention(types.SimpleNamespace(**args), 40, 5, self_attention=True, subln=True)
        ranked = torchscale.DilatedAttention(types.SimpleNamespace(**args, seq_parallel=True), 40, 5, self_attention=True, subln=True)
        alone.load_state_dict({name: worlds_equal(value) for name, value in alone.state_dict().items()})
        ranked.load_state_dict(alone.state_dict())
        sharding = Sharding("contiguous", tokens=N, ranks=p)
        mine = sharding.shard(x.detach(), rank=rank).requires_grad_()
        with pytest.raises(InvalidArgument, match="on rank 1: key has shape|^rank 1/3: key has shape"):
            ranked(mine, mine[..., 1:] if rank == 1 else mine, mine)
        compare("torchscale", ranked(mine, mine, mine, is_causal=causal)[0], (mine,), (x,), alone(x, x, x, is_causal=causal)[0], sharding, rank)


def worlds_equal(value):
    """The value of rank 0."""
    value = value.clone()
    dist.broadcast(value, 0)
    return value


def test_on_three_ranks():
    worlds.run_ranks(3, everything)
