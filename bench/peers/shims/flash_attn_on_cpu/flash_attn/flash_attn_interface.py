"""(batch, tokens, heads, head_dim), as flash-attn 2.7 has them; lse (batch, heads, tokens), natural logarithm."""

import torch

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _refuse(q, k, dropout_p, causal, left, right, softcap, alibi_slopes):
    if dropout_p or (left, right) not in ((-1, -1), (-1, 0)) or softcap or alibi_slopes is not None:
        raise NotImplementedError("this shim for flash-attn has no windows, softcap, ALiBi or dropout")
    if causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError("this shim for flash-attn is causal only where q and k have the same length")


def _heads_first(q, k, v):
    group = q.shape[2] // k.shape[2]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
    return [t.transpose(1, 2) for t in (q, k, v)]


def _flash_attn_forward(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0,
                        alibi_slopes=None, return_softmax=False):  # fmt: skip
    _refuse(q, k, dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    out, lse = _forward(*_heads_first(q, k, v), 0.0, causal, scale=softmax_scale)
    return out.transpose(1, 2), lse, None, None


def _flash_attn_backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p=0.0, softmax_scale=None, causal=False, window_size_left=-1,
                         window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None):  # fmt: skip
    _refuse(q, k, dropout_p, causal, window_size_left, window_size_right, softcap, alibi_slopes)
    lse = softmax_lse.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel's own layout
    heads_first = _heads_first(q, k, v)
    grads = _backward(dout.transpose(1, 2), *heads_first, out.transpose(1, 2), lse, 0.0, causal, scale=softmax_scale)
    for buffer, grad in zip((dq, dk, dv), grads):
        grad = grad.transpose(1, 2)
        group = grad.shape[2] // buffer.shape[2]
        buffer.copy_(grad.unflatten(2, (buffer.shape[2], group)).sum(3) if group > 1 else grad)
    return None


def _flash_attn_varlen_forward(*_, **__):
    raise NotImplementedError("this shim for flash-attn has no packed sequences")


_flash_attn_varlen_backward = _flash_attn_varlen_forward


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, softmax_scale, causal):
        out, lse, _, _ = _flash_attn_forward(q, k, v, softmax_scale=softmax_scale, causal=causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = softmax_scale, causal
        ctx.mark_non_differentiable(lse)  # flash-attn drops its gradient too
        return out, lse

    @staticmethod
    def backward(ctx, dout, _):
        q, k, v, out, lse = ctx.saved_tensors
        grads = [torch.empty_like(t) for t in (q, k, v)]
        _flash_attn_backward(dout, q, k, v, out, lse, *grads, softmax_scale=ctx.scale, causal=ctx.causal)
        return (*grads, None, None)


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                    deterministic=False, return_attn_probs=False):  # fmt: skip
    _refuse(q, k, dropout_p, causal, *window_size, softcap, alibi_slopes)
    out, lse = _Flash.apply(q, k, v, softmax_scale, causal)
    return (out, lse, None) if return_attn_probs else out
