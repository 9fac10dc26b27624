"""Sharding of torch tensors: from whole tensors to a rank's part and back, positions, labels and the mean of losses."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from .. import _check, _core
from .._sharding import Sharding as _Sharding, _positions
from ..errors import InvalidArgument, Unsupported
from . import _collectives, _group, _transport
from ._attention import refuse_spread

_Method = TypeVar("_Method", bound=Callable)


def _outside_graphs(method: _Method) -> _Method:
    """torch.compile cannot trace it (NumPy's arrays of the C++ core, collectives): its graph ends before and goes on after."""
    return torch.compiler.disable(method)


# An op, for a graph may have any number of its results: of the constants of one function it takes only one.
torch.library.define("ringspan::positions", "(str kind, int tokens, int ranks, int rank) -> Tensor", tags=torch.Tag.pt2_compliant_tag)


@torch.library.impl("ringspan::positions", "CompositeExplicitAutograd")
def _(kind, tokens, ranks, rank):
    return torch.from_numpy(_positions(kind, tokens, ranks, rank).copy())  # the caller's to change


@torch.library.register_fake("ringspan::positions")
def _(kind, tokens, ranks, rank):
    return torch.empty(_core.shard_rows(kind, tokens, ranks, rank), dtype=torch.int64, device="cpu")


def _described(tensor, tokens=None):
    """Its dtype and shape, of which ranks may differ in the dimension of their tokens."""
    sizes = ["tokens" if d == tokens else str(size) for d, size in enumerate(tensor.shape)]
    return f"{str(tensor.dtype).removeprefix('torch.')} ({', '.join(sizes)}) on {tensor.device.type}"


def _labels(tensor):
    """Integers as int64: a narrow type, uint8 say, has no room for an ignore_index beside its values."""
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


def _refuse_transforms(name, t):
    functorch = torch._C._functorch
    if functorch.maybe_current_level() is not None or functorch.is_legacy_batchedtensor(t):  # the latter of is_grads_batched
        raise Unsupported(f"{name} is inside of torch.vmap (is_grads_batched=True is one), torch.func.grad, vjp, jvp or a transform made of them, "
                          "for which what the ranks of a group do together has no rule; call it outside, and take gradients one by one, by "
                          "backward() or torch.autograd.grad")  # fmt: skip


class _Unshard(torch.autograd.Function):
    """All ranks' parts as one tensor, on every rank. Backward: this rank's rows of the sum of all ranks' gradients, for every rank
    computes with the whole tensor."""

    @staticmethod
    def forward(ctx, local, sharding, group, dim):
        ctx.sharding, ctx.group, ctx.dim = sharding, _transport.name_of(group), dim  # by name: a graph does not keep the group
        rows = max(sharding.rows(r) for r in range(sharding.ranks))
        local = local.movedim(dim, 0)
        padded = local.new_zeros((rows, *local.shape[1:]))
        padded[: local.shape[0]] = local
        parts = [torch.empty_like(padded) for _ in range(sharding.ranks)]
        _collectives.all_gather(parts, padded, group)
        whole = local.new_empty((sharding.tokens, *local.shape[1:]))
        for rank, part in enumerate(parts):
            positions = sharding.positions(rank).to(whole.device)
            whole[positions] = part[: positions.numel()]
        return whole.movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        with _group.together(_transport.group_named(ctx.group)):
            _refuse_transforms("the backward of unshard", grad)
        return _RowsOfSum.apply(grad, ctx.sharding, ctx.group, ctx.dim), None, None, None


class _RowsOfSum(torch.autograd.Function):
    """This rank's rows of the sum of all ranks' tensors. Backward: all ranks' gradients as one tensor, for every rank's rows are in the sum."""

    @staticmethod
    def forward(ctx, whole, sharding, name, dim):
        ctx.sharding, ctx.group, ctx.dim = sharding, name, dim
        group = _transport.group_named(name)
        with _group.together(group):
            whole = whole.contiguous().clone()
        _group.meet(group, f"the backward of unshard of {_described(whole)}")
        _collectives.all_reduce(whole, group)
        return whole.index_select(dim, sharding.positions(dist.get_rank(group)).to(whole.device))

    @staticmethod
    def backward(ctx, grad):
        group = _transport.group_named(ctx.group)
        with _group.together(group):
            _refuse_transforms("the gradient of the backward of unshard", grad)
        _group.meet(group, f"the gradient of the backward of unshard of {_described(grad, ctx.dim)}")
        return _Unshard.apply(grad, ctx.sharding, group, ctx.dim), None, None, None


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks, whose gradient goes to each rank as it is: losses add up."""

    @staticmethod
    def forward(ctx, value, group):
        value = value.clone()
        _collectives.all_reduce(value, group)
        return value

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Sharding(_Sharding):
    """A ringspan.Sharding with tensors: shard, unshard, positions for RoPE, labels, the mean of losses.

    ```python
    sharding = Sharding("zigzag", tokens=n, ranks=dist.get_world_size(group))
    x = sharding.shard(x, rank=r)                       # (batch, tokens, ...) -> (batch, this rank's tokens, ...)
    o = attention(q, k, v, causal=True, group=group, sharding=sharding)
    whole = sharding.unshard(o, group=group)
    ```
    """

    def positions(self, rank: int) -> torch.Tensor:
        """The global positions of the rank's tokens, in the order in which it stores them: what RoPE needs."""
        return torch.ops.ringspan.positions(self.kind, self.tokens, self.ranks, self._checked_rank(rank))

    @_outside_graphs
    def shard(self, tensor: torch.Tensor, *, rank: int | None = None, group=None, dim: int = 1) -> torch.Tensor:
        """The rank's part of a whole tensor; differentiable. Without a rank: this process's in the group."""
        if rank is None:
            if group is None:
                raise InvalidArgument("shard() needs rank, or the group in which this process has one")
            rank = dist.get_rank(_transport.group_of(group))
        dim = self._checked_dim(tensor, dim, self.tokens)
        return tensor.index_select(dim, self.positions(rank).to(tensor.device))

    @_outside_graphs
    def unshard(self, tensor: torch.Tensor | list[torch.Tensor], *, group=None, dim: int = 1) -> torch.Tensor:
        """The whole tensor on every rank, from each rank's part; or, without a group, from the list of all parts. Differentiable:
        a rank's part gets the sum of the gradients that the ranks have for it."""
        if isinstance(tensor, (list, tuple)):
            if group is not None or len(tensor) != self.ranks:
                raise InvalidArgument(f"a list of {len(tensor)} parts needs no group and must have {self.ranks} of them")
            for rank, part in enumerate(tensor):
                dim = self._checked_dim(part, dim, self.rows(rank))
            order = torch.cat([self.positions(rank) for rank in range(self.ranks)])
            whole = torch.cat(list(tensor), dim)
            return whole.index_select(dim, torch.argsort(order).to(whole.device))
        if group is None:
            raise InvalidArgument("unshard() needs the group, or the list of all ranks' parts")
        group = _transport.group_of(group)
        with _group.together(group):
            if dist.get_world_size(group) != self.ranks:
                raise InvalidArgument(f"the group has {dist.get_world_size(group)} ranks, but the sharding {self.ranks}")
            dim = self._checked_dim(tensor, dim, self.rows(dist.get_rank(group)))
            if tensor.layout != torch.strided:
                raise InvalidArgument(f"the tensor has layout {tensor.layout}; expected torch.strided")
            _refuse_transforms("unshard", tensor)
        _group.meet(group, f"unshard of {_described(tensor, dim)} by {self!r}")
        return _Unshard.apply(tensor, self, group, dim)

    @_outside_graphs
    def next_labels(
        self, tokens: torch.Tensor, *, rank: int, dim: int = 1, ignore_index: int = -100, cu_seqlens=None
    ) -> torch.Tensor:
        """The labels of the rank's tokens for predicting the next one, from the whole sequence: each token's successor, also
        where another rank holds it; the last token (of each document) has ignore_index. Those of integers are int64."""
        dim = self._checked_dim(tokens, dim, self.tokens)
        tokens, ignore_index = _labels(tokens), _check.integer(ignore_index, "ignore_index")
        labels = torch.full_like(tokens, ignore_index)
        if self.tokens > 1:
            labels.narrow(dim, 0, self.tokens - 1).copy_(tokens.narrow(dim, 1, self.tokens - 1))
        if cu_seqlens is not None:
            ends = _check.packed(cu_seqlens, "cu_seqlens", self.tokens)[1:]
            last = torch.as_tensor([end - 1 for end in ends if end > 0], dtype=torch.int64, device=labels.device)
            labels.index_fill_(dim, last, ignore_index)
        return self.shard(labels, rank=rank, dim=dim)

    @_outside_graphs
    def mean_loss(
        self, losses: torch.Tensor, *, group, labels: torch.Tensor | None = None, ignore_index: int = -100
    ) -> torch.Tensor:
        """The mean over all ranks' tokens of per-token losses (token-weighted, so uneven shards and ignored labels count right).

        Backward gives each rank the gradient of the mean with respect to its own losses; gradients of weights are then to be
        *summed* over the ranks (DDP and FSDP average: multiply the loss by the number of ranks)."""
        group = _transport.group_of(group)
        with _group.together(group):
            if not isinstance(losses, torch.Tensor):
                raise InvalidArgument(f"losses ({losses!r}) must be a tensor, of this rank's tokens")
            refuse_spread("losses", losses)
            _refuse_transforms("mean_loss", losses)
            if labels is None:
                count = torch.tensor(float(losses.numel()), dtype=torch.float64, device=losses.device)
            else:
                if not isinstance(labels, torch.Tensor):
                    raise InvalidArgument(f"labels ({labels!r}) must be a tensor, one of each of the losses")
                if labels.shape != losses.shape or labels.device != losses.device:
                    raise InvalidArgument(
                        f"labels have shape {tuple(labels.shape)} on {labels.device}, the losses {tuple(losses.shape)} on {losses.device}"
                    )
                valid = _labels(labels) != _check.integer(ignore_index, "ignore_index")
                losses = losses.where(valid, torch.zeros_like(losses))
                count = valid.sum(dtype=torch.float64)
            local = losses.sum(dtype=torch.float32)
        _group.meet(group, f"mean_loss on {local.device.type}")
        _collectives.all_reduce(count, group)
        total = _SumOverRanks.apply(local, group)
        return total / count.clamp(min=1.0).to(total.dtype)

    def _checked_dim(self, tensor, dim, expected):
        """The dimension counted from the first; the tensor has `expected` tokens in it."""
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"expected a tensor with {expected} tokens in dimension {dim}, not {type(tensor).__name__}")
        refuse_spread("tensor", tensor)
        dim, dims = _check.integer(dim, "dim"), tensor.dim()
        if not -dims <= dim < dims:
            raise InvalidArgument(f"dim ({dim}) must be in [{-dims}, {dims}), for the tensor has {dims} dimensions")
        if tensor.shape[dim] != expected:
            raise InvalidArgument(f"the tensor has {tensor.shape[dim]} tokens in dimension {dim}; expected {expected}")
        return dim % dims
