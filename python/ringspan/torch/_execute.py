"""The ops: tensors as the library takes them, results, and what backward needs of forward."""

import torch

from .. import _core
from . import _simulate
from ._call import Call, keeps_o, saved_bytes
from ._sessions import alone, group_named, run_call, together


def empty_number(like, group):
    """For the number of a call on a group, by which ranks see that their backwards are of the same forward; nothing without one."""
    return like.new_empty((1,), dtype=torch.int64, device="cpu") if group else like.new_empty((0,), dtype=torch.int64)


def empty_saved(like, count=0):
    return like.new_empty((count,), dtype=torch.uint8)


def empty_rows(like, dim, layout):
    """(batch, tokens, heads, dim), dense in the caller's layout."""
    b, n, h = like.shape[0], like.shape[1], like.shape[2]
    return like.new_empty((b, h, n, dim)).transpose(1, 2) if layout == "bhsd" else like.new_empty((b, n, h, dim))


def _needed_bytes(saved, spec, q, group):
    """Those of the rows of q that this rank merges; simulated ranks together merge all."""
    if not (spec.replicated_q and group and saved.numel()):
        return saved.numel()
    core = group_named(group).core
    return saved.numel() // q.shape[1] * _core.shard_rows(spec.sharding.kind, q.shape[1], core.size, core.rank)


def _named(call, q, alibi, sinks, saved, group):
    """The arguments by which the library knows what is not always there."""
    place, named = call.place, {}
    if saved is not None:
        named["saved"], named["saved_bytes"] = place.address(saved), _needed_bytes(saved, call.spec, q, group)
    if alibi is not None:
        named["alibi"], named["alibi_stride"] = place.address(alibi), q.shape[2] if alibi.dim() == 2 else 0
    if sinks is not None:
        named["sinks"] = place.address(sinks)
    return named


def _forward(call, q, k, v, alibi, sinks):
    """o, lse, what is kept for backward or None, and run(seed, group), which computes them and returns the number of the call on the group.
    What may fail on one rank only does so before run()."""
    place = call.place
    q, k, v = place.dense_rows(q), place.dense_rows(k), place.dense_rows(v)
    alibi, sinks = place.vector(alibi), place.vector(sinks)
    o, lse, saved = [of and place.empty(*of) for of in call.results]

    def run(seed, group=""):
        named = _named(call, q, alibi, sinks, saved, group)

        def simulate(plans):
            if place.kind == "cpu":
                _core.simulate_forward(plans, q, k, v, o, lse, **named)
            else:
                _simulate.forward(place, plans, (q, k, v, o, lse), dict(named, deterministic=call.spec.deterministic))

        return run_call(call, 0, seed, group, lambda session: session.forward(q, k, v, o, lse, **named), simulate, (q, k, v, o, lse, saved))

    return o, lse, saved, run


def _backward(call, d_out, dlse, q, k, v, o, lse, saved, alibi, sinks):
    """(dq, dk, dv), dsinks or None, and run(number, seed, group), likewise; `number`: of the call of forward.
    o is None where it is kept in `saved`, which is None where nothing is."""
    place = call.place
    q, k, v = place.dense_rows(q), place.dense_rows(k), place.dense_rows(v)
    d_out, dlse = place.pinned(place.dense_rows(d_out)), place.pinned(dlse)
    if call.spec.rounds_o:
        d_out = place.aligned_rows(d_out)
    alibi, sinks = place.vector(alibi), place.vector(sinks)
    gradients = [place.empty(*of) for of in call.gradients]
    dsinks = None if sinks is None else torch.zeros(q.shape[2], dtype=torch.float32, device=place.device)
    inputs = (q, k, v, o, lse, d_out, dlse)
    tensors = (*inputs, *gradients)

    def run(number, seed, group=""):
        vectors = _named(call, q, alibi, sinks, saved, group)
        named = vectors if dsinks is None else dict(vectors, dsinks=place.address(dsinks))

        def simulate(plans):
            if place.kind == "cpu":
                _core.simulate_backward(plans, tensors, **named)
            else:
                of_sinks = q.new_empty((0,), dtype=torch.float32) if dsinks is None else dsinks
                _simulate.backward(place, plans, inputs, (*gradients, of_sinks), dict(vectors, deterministic=call.spec.deterministic))

        run_call(call, number, seed, group, lambda session: session.backward(tensors, **named), simulate, (*tensors, dsinks, saved))

    return gradients, dsinks, run


def is_in_one(call, alibi, sinks, seed):
    """Whether forward_alone() and backward_alone() take and give tensors in the caller's layout."""
    return call.in_one and alibi is sinks is seed is None


def swapped(*tensors):
    """Heads before tokens, or the other way round."""
    return [t if t is None else t.transpose(1, 2) for t in tensors]


def forward_alone(call, q, k, v, alibi, sinks, seed):
    """Of one rank: o, lse, and what is kept for backward or None."""
    if is_in_one(call, alibi, sinks, seed):
        return alone.run(call, 0, lambda session: session.forward_new(call.place.empty, call.new_results, call.heads_first, q, k, v), None)
    o, lse, saved, run = _forward(call, q, k, v, alibi, sinks)
    run(seed)
    return o, lse, saved


def backward_alone(call, d_out, dlse, q, k, v, o, lse, saved, alibi, sinks, seed):
    """Of one rank: dq, dk, dv, and dsinks or None."""
    if is_in_one(call, alibi, sinks, seed):
        if not call.spec.rounds_o:
            given = (q, k, v, o, lse, d_out, dlse)
            new, heads_first = call.new_gradients, call.heads_first
            return *alone.run(call, 0, lambda session: session.backward_new(call.place.empty, new, heads_first, given, saved), None), None
        if call.heads_first:
            d_out, q, k, v, o = swapped(d_out, q, k, v, o)
    gradients, dsinks, run = _backward(call, d_out, dlse, q, k, v, o, lse, saved, alibi, sinks)
    run(0, seed)
    if call.heads_first and is_in_one(call, alibi, sinks, seed):
        gradients = swapped(*gradients)
    return *gradients, None if sinks is None else dsinks.to(sinks.device)


def forward(q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, text, group):
    """The op."""
    with together(group):
        call = Call(q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, text)
        o, lse, saved, run = _forward(call, q, k, v, alibi, sinks)
        if saved is None:
            saved = empty_saved(q)
        number = empty_number(q, group)
    calls = run(seed, group)
    if group:
        number.fill_(calls)
    return o, lse, saved, number


def backward(d_out, dlse, q, k, v, o, lse, saved, number, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, text, group):
    """The op. o is None where it is kept in `saved`."""
    with together(group):
        call = Call(q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, text)
        gradients, dsinks, run = _backward(call, d_out, dlse, q, k, v, o, lse, saved if saved.numel() else None, alibi, sinks)
        if dsinks is None:
            dsinks = q.new_empty((0,), dtype=torch.float32)
    run(int(number.item()) if group else 0, seed, group)
    if group and sinks is not None:
        dsinks /= group_named(group).core.size  # every rank has the sum; shares add up to it, as those of weights do
    return *gradients, dsinks.to((q if sinks is None else sinks).device)


__all__ = [
    "backward", "backward_alone", "empty_number", "empty_rows", "empty_saved", "forward", "forward_alone", "is_in_one", "keeps_o", "saved_bytes",
    "swapped",
]  # fmt: skip
