"""What torch's FlopCounterMode counts for a call of attention: the products of the pairs that its pattern has, two of them per pair
forward and five backward, as Plan.flops. In a group those of this rank."""

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.flop_counter import register_flop_formula

from .. import _core
from ..errors import Unsupported
from . import _ops  # noqa: F401, defines the ops
from ._call import Call
from ._sessions import alone, group_named


def _flops(backward, q, k, v, alibi, sinks, lists, text, group):
    if q.shape[0] == 0:
        return 0
    is_fake = isinstance(q, FakeTensor) or q.device.type == "meta"
    if group and not is_fake:
        return int(group_named(group).latest.core.plan.flops(backward))  # of the call that has just been made
    if is_fake and any(t is not None for t in lists):
        raise Unsupported("how many flops attention takes depends on cu_seqlens, lengths and starts_k, whose values fake tensors do not have")
    call = Call(q, k, v, alibi, sinks, *lists, text)
    tokens_q, tokens_k = q.shape[1], k.shape[1]
    if not group:
        return int(sum(plan.flops(backward) for plan in alone.plans_of(call, (call.key, 1, False), call.spec.ranks or 1)))
    core = group_named(group).core
    problem = call.problem(tokens_q if call.spec.replicated_q else tokens_q * core.size, tokens_k * core.size, core.size)
    return int(_core.make_plan(problem, call.options(1, core.size), core.rank).flops(backward))


@register_flop_formula(torch.ops.ringspan.attention_forward, get_raw=True)
def _(q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, text, group, *, out_val=None):
    return _flops(False, q, k, v, alibi, sinks, (cu_q, cu_k, len_q, len_k, start_k), text, group)


@register_flop_formula(torch.ops.ringspan.attention_backward, get_raw=True)
def _(d_out, dlse, q, k, v, o, lse, saved, number, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, text, group, *, out_val=None):
    return _flops(True, q, k, v, alibi, sinks, (cu_q, cu_k, len_q, len_k, start_k), text, group)
