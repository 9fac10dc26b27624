"""Collectives besides attention (unshard, mean_loss): what they give; one rank's mistake, or ranks that differ, raise on all, and the
group goes on."""

import pytest
import torch
import torch.distributed as dist
from worlds import run_ranks, try_ranks

import ringspan
import ringspan.torch as rt


def _unshard(rank, ranks):
    group = dist.group.WORLD
    x = torch.arange(2 * 11 * 3, dtype=torch.float32).reshape(2, 11, 3)
    for kind in ("zigzag", "striped", "contiguous"):
        sharding = rt.Sharding(kind, tokens=11, ranks=ranks)
        local = sharding.shard(x, group=group).requires_grad_()
        whole = sharding.unshard(local, group=group)
        assert torch.equal(whole, x)
        weights = torch.arange(x.numel(), dtype=torch.float32).reshape(x.shape)
        (whole * weights * (rank + 1)).sum().backward()
        factor = ranks * (ranks + 1) / 2  # every rank uses the whole, with its own factor
        assert torch.allclose(local.grad, sharding.shard(weights, rank=rank) * factor)
        # The gradient of a gradient: of sum(weights * d/dx sum(x ** 3)), each rank's with its factor.
        cubes = (sharding.unshard(local, group=group) ** 3).sum() * (rank + 1)
        (slope,) = torch.autograd.grad(cubes, local, create_graph=True)
        assert torch.allclose(slope, sharding.shard(3 * x**2, rank=rank) * factor)
        (bend,) = torch.autograd.grad((slope * sharding.shard(weights, rank=rank)).sum(), local)
        assert torch.allclose(bend, sharding.shard(6 * x * weights, rank=rank) * factor)
        swapped = sharding.shard(x.transpose(0, 1).contiguous(), rank=rank, dim=0)
        assert torch.equal(sharding.unshard(swapped, group=group, dim=0), x.transpose(0, 1))
        # The mean of losses over uneven shards with ignored labels.
        tokens = torch.arange(22).reshape(2, 11)
        labels = sharding.next_labels(tokens, rank=rank, cu_seqlens=[0, 4, 11])
        losses = sharding.shard(x, rank=rank)[..., 0].requires_grad_()
        mean = sharding.mean_loss(losses, group=group, labels=labels)
        valid = torch.ones(2, 11, dtype=torch.bool)
        valid[:, [3, 10]] = False
        assert torch.allclose(mean, x[..., 0][valid].mean())
        mean.backward()
        assert torch.allclose(losses.grad, sharding.shard(valid.float() / valid.sum(), rank=rank))
    return True


def test_sharding_of_tensors():
    run_ranks(3, _unshard)


def _raises(call):
    with pytest.raises(ringspan.Error) as raised:
        call()
    return f"{type(raised.value).__name__}: {raised.value}"


def _mistaken(rank, ranks):
    group, first = dist.group.WORLD, rank == 0
    q = torch.ones(1, 4, 2, 8)
    sharding = rt.Sharding("contiguous", tokens=8, ranks=2)
    losses = torch.ones(1, 4)
    calls = [
        lambda: rt.attention(q, q, q, group=group, **(dict(kernel="portable") if first else {})),
        lambda: sharding.unshard(q.double() if first else q, group=group),
        lambda: sharding.unshard(q[:, :3] if first else q, group=group),
        lambda: sharding.unshard(q[..., :5] if first else q, group=group),
        lambda: sharding.mean_loss(losses, group=group, labels=torch.ones(1, 3 if first else 4)),
        lambda: sharding.mean_loss(0.0 if first else losses, group=group),
        lambda: sharding.mean_loss(losses, group=group, labels=[0] if first else losses),
        lambda: sharding.mean_loss(losses, group=group, labels=losses, ignore_index=None if first else -100),
        lambda: sharding.unshard(q.to_sparse() if first else q, group=group),
        lambda: sharding.unshard(q, group=group) if first else rt.attention(q, q, q, group=group),
        lambda: sharding.unshard(q, group=group) if first else sharding.mean_loss(losses, group=group),
    ]
    texts = []
    for call in calls:
        texts.append(_raises(call))
        assert float(sharding.mean_loss(losses, group=group)) == 1.0
    labels = torch.full((1, 4), 156, dtype=torch.uint8)  # the byte of -100, which is none to ignore
    assert float(sharding.mean_loss(losses, group=group, labels=labels)) == 1.0
    x = torch.ones(1, 4, 3, requires_grad=True)
    whole = sharding.unshard(x, group=group)
    texts.append(_raises(lambda: whole.sum().backward() if first else sharding.mean_loss(losses, group=group)))
    return texts


def test_what_differs_raises_on_all_ranks():
    first, second = (value for _, value in try_ranks(2, _mistaken))
    expected = [
        ("CommError: rank {}/2: ranks disagree on kernel: portable on rank 0, none on rank 1",) * 2,
        ("CommError: rank {}/2: ranks disagree on the call: unshard of float64 (1, tokens, 2, 8) on cpu by Sharding('contiguous', tokens=8, ranks=2) "
         "on rank 0, unshard of float32 (1, tokens, 2, 8) on cpu by Sharding('contiguous', tokens=8, ranks=2) on rank 1",) * 2,
        ("InvalidArgument: rank 0/2: the tensor has 3 tokens in dimension 1; expected 4",
         "InvalidArgument: rank 1/2: on rank 0: the tensor has 3 tokens in dimension 1; expected 4"),
        ("CommError: rank {}/2: ranks disagree on the call: unshard of float32 (1, tokens, 2, 5) on cpu by Sharding('contiguous', tokens=8, ranks=2) "
         "on rank 0, unshard of float32 (1, tokens, 2, 8) on cpu by Sharding('contiguous', tokens=8, ranks=2) on rank 1",) * 2,
        ("InvalidArgument: rank 0/2: labels have shape (1, 3) on cpu, the losses (1, 4) on cpu",
         "InvalidArgument: rank 1/2: on rank 0: labels have shape (1, 3) on cpu, the losses (1, 4) on cpu"),
        ("InvalidArgument: rank 0/2: losses (0.0) must be a tensor, of this rank's tokens",
         "InvalidArgument: rank 1/2: on rank 0: losses (0.0) must be a tensor, of this rank's tokens"),
        ("InvalidArgument: rank 0/2: labels ([0]) must be a tensor, one of each of the losses",
         "InvalidArgument: rank 1/2: on rank 0: labels ([0]) must be a tensor, one of each of the losses"),
        ("InvalidArgument: rank 0/2: ignore_index (None) must be an integer", "InvalidArgument: rank 1/2: on rank 0: ignore_index (None) must be an integer"),
        ("InvalidArgument: rank 0/2: the tensor has layout torch.sparse_coo; expected torch.strided",
         "InvalidArgument: rank 1/2: on rank 0: the tensor has layout torch.sparse_coo; expected torch.strided"),
        ("CommError: rank 0/2: ranks make different calls on this group; this one unshard of float32 (1, tokens, 2, 8) on cpu by "
         "Sharding('contiguous', tokens=8, ranks=2)", "CommError: rank 1/2: ranks make different calls on this group; this one attention"),
        ("CommError: rank {}/2: ranks disagree on the call: unshard of float32 (1, tokens, 2, 8) on cpu by Sharding('contiguous', tokens=8, ranks=2) "
         "on rank 0, mean_loss on cpu on rank 1",) * 2,
        ("CommError: rank {}/2: ranks disagree on the call: the backward of unshard of float32 (1, 8, 3) on cpu on rank 0, mean_loss on cpu on rank 1",) * 2,
    ]  # fmt: skip
    for index, texts in enumerate(expected):
        for rank, outcome in enumerate((first, second)):
            assert outcome[index] in (texts[rank], texts[rank].format(rank)), index


def _transformed(rank, ranks):
    group, sharding = dist.group.WORLD, rt.Sharding("contiguous", tokens=8, ranks=2)
    losses = torch.ones(1, 4)
    calls = {
        "unshard": lambda x: sharding.unshard(x, group=group).sum(),
        "mean_loss": lambda x: sharding.mean_loss(x, group=group),
    }
    transforms = [
        lambda call: torch.func.grad(call)(losses),
        lambda call: torch.func.vjp(call, losses),
        lambda call: torch.func.jvp(call, (losses,), (losses,)),
        lambda call: torch.vmap(call)(losses[None]),
    ]
    texts = []
    for name, call in calls.items():
        for transform in transforms:
            texts.append(_raises(lambda: transform(call) if rank == 0 else call(losses)))  # noqa: B023, called at once
            assert f"{name} is inside of torch.vmap (is_grads_batched=True is one), torch.func.grad" in texts[-1], texts[-1]
            assert float(sharding.mean_loss(losses, group=group)) == 1.0
    x = torch.ones(1, 4, requires_grad=True)
    whole = sharding.unshard(x, group=group)
    grad = torch.ones(1, 8)
    batched, plain = (dict(grad_outputs=grad[None], is_grads_batched=True), dict(grad_outputs=grad))
    texts.append(_raises(lambda: torch.autograd.grad(whole, x, retain_graph=True, **(plain if rank else batched))))
    assert "the backward of unshard is inside of torch.vmap" in texts[-1], texts[-1]
    assert torch.equal(torch.autograd.grad(whole, x, grad)[0], torch.full((1, 4), 2.0))
    return texts


def test_a_transform_on_one_rank_is_refused_on_all():
    outcomes = try_ranks(2, _transformed, timeout=60.0)
    assert [kind for kind, _ in outcomes] == ["value"] * 2, outcomes
    for text, told in zip(*(value for _, value in outcomes), strict=True):
        assert text.startswith("Unsupported: rank 0/2: ") and told.startswith("Unsupported: rank 1/2: on rank 0: ")
