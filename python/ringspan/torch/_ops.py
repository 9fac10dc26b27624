"""The two ops, registered with torch.library: kernels, fake kernels, autograd.

Tensors are (batch, tokens, heads, head_dim) with any strides; what is not a tensor is in the spec, a string.
"""

import torch

from ..errors import Unsupported
from . import _execute
from ._spec import decode

_TAIL = (
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? lengths_q, Tensor? lengths_k, "
    "Tensor? seed, str spec, str group"
)
torch.library.define(
    "ringspan::attention_forward", f"(Tensor q, Tensor k, Tensor v, {_TAIL}) -> (Tensor, Tensor, Tensor, Tensor)", tags=torch.Tag.pt2_compliant_tag
)
torch.library.define(
    "ringspan::attention_backward",
    f"(Tensor d_out, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? o, Tensor lse, Tensor saved, Tensor number, {_TAIL}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
for _key in ("CPU", "CUDA"):  # where a graph breaks before an op, torch.compile would go on inside of it
    torch.library.impl("ringspan::attention_forward", _key, torch.compiler.disable(_execute.forward))
    torch.library.impl("ringspan::attention_backward", _key, torch.compiler.disable(_execute.backward))


@torch.library.register_fake("ringspan::attention_forward")
def _(q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, seed, text, group):
    spec = decode(text)
    o = _execute.empty_rows(q, v.shape[3], spec.layout)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return o, lse, q.new_empty((_execute.saved_bytes(spec, q, v),), dtype=torch.uint8), _execute.empty_number(q, group)


@torch.library.register_fake("ringspan::attention_backward")
def _(d_out, dlse, q, k, v, o, lse, saved, number, alibi, sinks, cu_q, cu_k, len_q, len_k, seed, text, group):
    layout = decode(text).layout
    dsinks = (sinks if sinks is not None else q).new_empty((q.shape[2] if sinks is not None else 0,), dtype=torch.float32)
    return (*(_execute.empty_rows(t, t.shape[3], layout) for t in (q, k, v)), dsinks)


def _setup_context(ctx, inputs, output):
    q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, seed, text, group = inputs
    o, lse, saved, number = output
    ctx.set_materialize_grads(False)
    # Where o was kept in float32 the rounded one is not read.
    keeps = _execute.keeps_o(decode(text), q)
    ctx.save_for_backward(q, k, v, None if keeps else o, lse, saved, number, alibi, sinks, cu_q, cu_k, len_q, len_k, seed)
    ctx.text, ctx.group = text, group


def _backward(ctx, d_out, dlse, *_):
    q, k, v, o, lse, saved, number, alibi, sinks, *rest = ctx.saved_tensors
    if d_out is None:
        d_out = q.new_zeros((1, 1, 1, 1)).expand(*q.shape[:3], v.shape[3])
        d_out = d_out.contiguous()
    dq, dk, dv, dsinks = torch.ops.ringspan.attention_backward(
        d_out, dlse, q, k, v, o, lse, saved, number, alibi, sinks, *rest, ctx.text, ctx.group
    )
    return (dq, dk, dv, None, dsinks if sinks is not None else None, *([None] * 7))


def _backward_of_backward(ctx, *_):
    raise Unsupported(
        "the gradient of a gradient of attention (create_graph=True, a Hessian, a gradient penalty) is not there; torch's "
        "scaled_dot_product_attention has it with sdpa_kernel(SDPBackend.MATH)"
    )


torch.library.register_autograd("ringspan::attention_forward", _backward, setup_context=_setup_context)
torch.library.register_autograd("ringspan::attention_backward", _backward_of_backward)  # without it torch takes it for a constant

attention_forward = torch.ops.ringspan.attention_forward
