"""Simulated ranks on a device: rows are dealt to the ranks and gathered again by torch, there; each rank is a thread.

On CUDA all ranks use torch's current stream, and the host waits for each pass.
"""

import torch

from .. import _core
from .._sharding import Sharding
from ._device import handle_of


def _positions(place, plans, of_queries):
    """Of each rank the positions in its tensors, as tensors of the device."""
    problem = plans[0].problem
    if of_queries and problem.replicated_q:
        return [torch.arange(problem.tokens_q, device=place.device)] * len(plans)
    kind, tokens = (problem.sharding_q, problem.tokens_q) if of_queries else (problem.sharding_k, problem.tokens_k)
    sharding = Sharding(kind, tokens=tokens, ranks=len(plans))
    return [torch.from_numpy(sharding.positions(rank).copy()).to(place.device) for rank in range(len(plans))]


def forward(place, plans, tensors, named):
    q, k, v, o, lse = tensors
    queries, keys = _positions(place, plans, True), _positions(place, plans, False)
    shards = []
    for i, j in zip(queries, keys):
        part = q.index_select(1, i)
        shards.append((part, k.index_select(1, j), v.index_select(1, j), part.new_empty((*part.shape[:3], v.shape[3])),
                       lse.index_select(2, i)))  # fmt: skip
    _core.simulate_forward_shards(plans, place.name, handle_of(place.stream()), shards, **named)
    for i, shard in zip(queries, shards):
        o.index_copy_(1, i, shard[3])
        lse.index_copy_(2, i, shard[4])


def backward(place, plans, inputs, gradients, named):
    q, k, v, o, lse, d_out, dlse = inputs
    dq, dk, dv, dsinks = gradients
    queries, keys = _positions(place, plans, True), _positions(place, plans, False)
    of_ranks = dsinks.new_zeros((len(plans), dsinks.numel()))  # every rank has the sum over all ranks
    shards = []

    def rows(t, index, dim=1):
        return None if t is None else t.index_select(dim, index)

    for i, j in zip(queries, keys):
        part = [rows(q, i), rows(k, j), rows(v, j), rows(o, i), rows(lse, i, 2), rows(d_out, i), rows(dlse, i, 2)]
        part += [torch.empty_like(part[0]), torch.empty_like(part[1]), torch.empty_like(part[2])]
        shards.append(part)
    named = dict(named, dsinks=[place.address(row) for row in of_ranks] if dsinks.numel() else [])
    _core.simulate_backward_shards(plans, place.name, handle_of(place.stream()), shards, **named)
    for i, j, part in zip(queries, keys, shards):
        dq.index_copy_(1, i, part[7])
        dk.index_copy_(1, j, part[8])
        dv.index_copy_(1, j, part[9])
    dsinks.copy_(of_ranks[0])
