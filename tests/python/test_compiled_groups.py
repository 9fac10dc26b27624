"""One rank's mistake in a compiled call, where the graph may break: all ranks hear of it, and stay in step."""

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from worlds import try_ranks

import ringspan
import ringspan.torch as rt

try:
    from torch.distributed.tensor import DTensor, Shard
except ImportError:  # before torch 2.5
    from torch.distributed._tensor import DTensor, Shard

_MISTAKES = [
    (dict(pattern="foo"), "unknown term 'foo'"),
    (dict(pattern="documents"), "cu_seqlens must be given"),
    (dict(pattern="window:1,1", window=(2, 2)), "contradicts"),
    (dict(sharding="zag"), "unknown sharding 'zag'"),
    (dict(sharding_k="zag"), "unknown sharding 'zag'"),
    (dict(sharding=5), "sharding (5)"),
    (dict(strategy="rong"), "unknown strategy 'rong'"),
]


def _mistaken(rank, ranks):
    """What the library's parsers find, and a kind of tensor. The next call is in step again."""
    rt.set_deadline(20)
    x = torch.ones(1, 16, 2, 8)
    for options, text in _MISTAKES:
        torch._dynamo.reset()
        given = options if rank == 1 else {}
        function = torch.compile(lambda x: rt.attention(x, x, x, group=dist.group.WORLD, **given), backend="eager")
        with pytest.raises(ringspan.InvalidArgument) as caught:
            function(x)
        assert text in str(caught.value) and (rank == 1) != ("on rank 1: " in str(caught.value)), str(caught.value)
        assert (rt.attention(x, x, x, group=dist.group.WORLD) - 1).abs().max() < 1e-5
    spread = DTensor.from_local(x, dist.init_device_mesh("cpu", (ranks,)), [Shard(1)])
    torch._dynamo.reset()
    with pytest.raises(ringspan.Unsupported, match="to_local"):
        torch.compile(lambda x: rt.attention(x, x, x, group=dist.group.WORLD), backend="eager")(spread if rank == 1 else x)
    sharding = rt.Sharding("zigzag", tokens=16 * ranks, ranks=ranks)
    for name, call in (("tensor", sharding.unshard), ("losses", sharding.mean_loss)):
        with pytest.raises(ringspan.Unsupported, match=f"{name} is a DTensor.*to_local"):
            call(spread if rank == 1 else x, group=dist.group.WORLD)
    assert (rt.attention(x, x, x, group=dist.group.WORLD) - 1).abs().max() < 1e-5
    return True


def test_a_mistake():
    for kind, value in try_ranks(2, _mistaken):
        assert kind == "value", value[2]


def _tangents(rank, ranks):
    """Of one rank: what the op refuses is refused on all."""
    rt.set_deadline(20)
    x, slopes = torch.randn(1, 16, 2, 8), torch.ones(2)
    results = []

    def dual(t):
        return forward_ad.make_dual(t, torch.ones_like(t)) if rank == 1 else t

    def forward(q, slopes):
        return rt.attention(q, q, q, alibi_slopes=slopes, group=dist.group.WORLD, return_lse=True)

    for function in (forward, torch.compile(forward, backend="aot_eager", fullgraph=True)):
        q = x.clone().requires_grad_()
        o, lse = function(q, slopes)
        calls = [
            ("alibi_slopes", lambda: function(x, dual(slopes))),
            ("the gradient of o", lambda: o.backward(dual(torch.ones_like(o)), retain_graph=True)),
            ("the gradient of lse", lambda: lse.backward(dual(torch.ones_like(lse)), retain_graph=True)),
        ]
        for name, call in calls:
            with forward_ad.dual_level(), pytest.raises(ringspan.Unsupported, match=f"{name} has a tangent"):
                call()
        (o.sum() + lse.sum()).backward()
        results.append(q.grad)
    return torch.equal(*results)


def test_a_tangent_of_one_rank_is_refused_on_all():
    for kind, value in try_ranks(2, _tangents):
        assert kind == "value" and value, value
