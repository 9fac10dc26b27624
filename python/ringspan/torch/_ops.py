"""The two ops, registered with torch.library: kernels, fake kernels, autograd.

Tensors are (batch, tokens, heads, head_dim) with any strides; what is not a tensor is in the spec, a string.
"""

import torch
from torch.autograd import forward_ad

from ..errors import Unsupported
from . import _execute
from ._spec import decode, with_backward

_TAIL = (
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? lengths_q, Tensor? lengths_k, "
    "Tensor? starts_k, "
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
def _(q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, text, group):
    spec = decode(text)
    o = _execute.empty_rows(q, v.shape[3], spec.layout)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return o, lse, q.new_empty((_execute.saved_bytes(spec, q, v),), dtype=torch.uint8), _execute.empty_number(q, group)


@torch.library.register_fake("ringspan::attention_backward")
def _(d_out, dlse, q, k, v, o, lse, saved, number, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, text, group):
    layout = decode(text).layout
    dsinks = (sinks if sinks is not None else q).new_empty((q.shape[2] if sinks is not None else 0,), dtype=torch.float32)
    return (*(_execute.empty_rows(t, t.shape[3], layout) for t in (q, k, v)), dsinks)


def _tangent(t):
    return forward_ad.unpack_dual(t).tangent if forward_ad._current_level >= 0 else None


def check_derivatives(q, k, v, sinks):
    """What the op has no rule for would come out as zeros or None, without a word, or with torch's words about setup_context."""
    functorch = torch._C._functorch
    if forward_ad._current_level < 0 and functorch.maybe_current_level() is None:
        return
    for name, t in (("q", q), ("k", k), ("v", v), ("sinks", sinks)):
        while isinstance(t, torch.Tensor) and functorch.is_functorch_wrapped_tensor(t):
            if functorch.is_gradtrackingtensor(t) and (t.requires_grad or _tangent(t) is not None):
                raise Unsupported(f"{name} is inside of torch.func.grad, vjp, jvp or a transform made of them, for which attention has no rule; "
                                  "use backward() or torch.autograd.grad")  # fmt: skip
            t = functorch.get_unwrapped(t)
        if isinstance(t, torch.Tensor) and _tangent(t) is not None:
            raise Unsupported(f"{name} has a tangent: forward-mode derivatives of attention are not there; use backward() or torch.autograd.grad")


def check_slopes(t):
    if t is not None and t.requires_grad and torch.is_grad_enabled():
        raise Unsupported("alibi_slopes.requires_grad is True, but attention has no gradient for slopes; pass alibi_slopes.detach()")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, keys, *inputs):
        q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, text, group = inputs
        o, lse, saved, number = _below(keys, *inputs)
        ctx.set_materialize_grads(False)
        # Where o was kept in float32 the rounded one is not read.
        keeps = _execute.keeps_o(decode(text), q)
        ctx.save_for_backward(q, k, v, None if keeps else o, lse, saved, number, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed)
        ctx.text, ctx.group = text, group
        return o, lse, saved, number

    @staticmethod
    def backward(ctx, d_out, dlse, *_):
        q, k, v, o, lse, saved, number, alibi, sinks, *rest = ctx.saved_tensors
        if d_out is None:
            d_out = q.new_zeros((1, 1, 1, 1)).expand(*q.shape[:3], v.shape[3])
            d_out = d_out.contiguous()
        dq, dk, dv, dsinks = torch.ops.ringspan.attention_backward(
            d_out, dlse, q, k, v, o, lse, saved, number, alibi, sinks, *rest, ctx.text, ctx.group
        )
        return (None, dq, dk, dv, None, dsinks if sinks is not None else None, *([None] * 8))


def _below(keys, *inputs):
    with torch._C._AutoDispatchBelowAutograd():
        return attention_forward.default.redispatch(keys & torch._C._after_autograd_keyset, *inputs)


@torch.compiler.disable
def _autograd(keys, q, k, v, alibi, sinks, *rest):
    """Only here it is known whether gradients are needed: under vmap, in a graph that was compiled or exported, tensors do not say it before."""
    *rest, text, group = rest
    check_derivatives(q, k, v, sinks)
    if not torch.is_grad_enabled() or not any(t is not None and t.requires_grad for t in (q, k, v, alibi, sinks)):
        return _below(keys, q, k, v, alibi, sinks, *rest, text, group)
    check_slopes(alibi)
    return _Attention.apply(keys, q, k, v, alibi, sinks, *rest, with_backward(text), group)


def _backward_of_backward(ctx, *_):
    raise Unsupported(
        "the gradient of a gradient of attention (create_graph=True, a Hessian, a gradient penalty) is not there; torch's "
        "scaled_dot_product_attention has it with sdpa_kernel(SDPBackend.MATH)"
    )


_library = torch.library.Library("ringspan", "FRAGMENT")
_library.impl("attention_forward", _autograd, "Autograd", with_keyset=True)
torch.library.register_autograd("ringspan::attention_backward", _backward_of_backward)  # without it torch takes it for a constant

attention_forward = torch.ops.ringspan.attention_forward
