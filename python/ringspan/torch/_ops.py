"""The two ops, registered with torch.library: kernels, fake kernels, autograd. And attend(), a call of them.

Tensors are (batch, tokens, heads, head_dim) with any strides; what is not a tensor is in the spec, a string.

An op takes longer than a short attention: its arguments and results go through torch's dispatcher, in Python up to four times. Where the
dispatcher would do nothing but pass ordinary tensors on to the kernel, attend() goes there directly, with the same graph for backward.
"""

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad

from .. import _core
from ..errors import Unsupported
from . import _execute
from ._call import Known
from ._sessions import together
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
    return o, lse, _execute.empty_saved(q, _execute.saved_bytes(spec, q, v)), _execute.empty_number(q, group)


@torch.library.register_fake("ringspan::attention_backward")
def _(d_out, dlse, q, k, v, o, lse, saved, number, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, text, group):
    layout = decode(text).layout
    dsinks = (sinks if sinks is not None else q).new_empty((q.shape[2] if sinks is not None else 0,), dtype=torch.float32)
    return (*(_execute.empty_rows(t, t.shape[3], layout) for t in (q, k, v)), dsinks)


def _tangent(t):
    return forward_ad.unpack_dual(t).tangent if forward_ad._current_level >= 0 else None


def check_derivatives(q, k, v, sinks, alibi=None):
    _check_derivatives_of(("q", q), ("k", k), ("v", v), ("sinks", sinks), ("alibi_slopes", alibi))


def _check_derivatives_of(*named):
    """What the ops have no rule for would come out as zeros or None, without a word, or with torch's words about setup_context."""
    functorch = torch._C._functorch
    if forward_ad._current_level < 0 and functorch.maybe_current_level() is None:
        return
    for name, t in named:
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


def _dispatch_keys(*names):
    """As bits."""
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


def _ordinary_tensors():
    """None: of a torch that does not tell."""
    try:
        # All that the dispatcher sees in an ordinary tensor. What others have changes what is computed: meta, sparse, nested, quantized and fake
        # tensors, those of functorch's transforms and of functionalization, views that negate or conjugate, zeros without memory.
        keys = _dispatch_keys("CPU", "CUDA", "ADInplaceOrView", "AutogradFunctionality", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")
        from torch._C import _dispatch_keys as keys_of, _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
        from torch._C import _dispatch_tls_is_dispatch_key_excluded  # noqa: F401
        from torch._C._dynamo.eval_frame import get_eval_frame_callback as compiler
        from torch._C._functorch import maybe_current_level
    except (AttributeError, ImportError):
        return None
    types = torch.Tensor, torch.nn.Parameter  # of other classes __torch_function__ has to be asked
    quiet = (
        lambda: compiler() is not None or forward_ad._current_level >= 0, _len_torch_dispatch_stack, _len_torch_function_stack,
        _get_tracing_state, maybe_current_level,
    )  # fmt: skip
    return _core.Ordinary(types, keys_of, keys, quiet)


ORDINARY = _ordinary_tensors()
_AUTOGRAD = getattr(torch._C.DispatchKey, "AutogradFunctionality", None)


def are_ordinary(*given):
    """Whether these, None left out, are tensors that lie in memory, and no compiler, mode, transform or tracer of torch wants to see what is done
    with them."""
    return not torch.compiler.is_compiling() and ORDINARY is not None and ORDINARY.all(*given)


class _Attention(torch.autograd.Function):
    """keys: the dispatcher's, in an op, and spec its text; None: of attend(), which has no use for what only an op returns, and spec its Call,
    whose tensors may be in the caller's layout."""

    @staticmethod
    def forward(ctx, keys, *inputs):
        q, k, v, alibi, sinks, *lists, seed, spec, group = inputs
        if keys is None:
            ctx.call, spec = spec, spec.spec
            as_given = _execute.is_in_one(ctx.call, alibi, sinks, seed)
            o, lse, saved = _execute.forward_alone(ctx.call, q, k, v, alibi, sinks, seed)
            number = None
        else:
            ctx.call, spec, as_given = None, decode(spec), False
            o, lse, saved, number = _below(attention_forward, keys, *inputs)
        ctx.set_materialize_grads(False)
        # Where o was kept in float32 the rounded one is not read. All ways save the same: a checkpoint may take another one when it computes again.
        keeps = _execute.keeps_o(spec, q)
        ctx.swapped = spec.layout == "bhsd" and not as_given
        # Of an output a view, whose base it would be, and which autograd would keep with this node: they would keep each other.
        rows = q, k, v, None if keeps else o.detach() if ctx.swapped else o
        ctx.save_for_backward(*(_execute.swapped(*rows) if ctx.swapped else rows), lse, saved if keeps else None, number if group else None,
                              alibi, sinks, *lists, seed)  # fmt: skip
        ctx.text, ctx.group, ctx.heads_first = spec.text, group, spec.layout == "bhsd" and as_given
        return (o, lse) if keys is None else (o, lse, saved, number)

    @staticmethod
    def backward(ctx, d_out, dlse, *_):
        q, k, v, o, lse, saved, number, alibi, sinks, *lists, seed = ctx.saved_tensors
        if ctx.swapped:
            q, k, v, o = _execute.swapped(q, k, v, o)
        if d_out is None:
            d_out = q.new_zeros((1, 1, 1, 1)).expand(*q.shape[:3], v.shape[3])
            d_out = d_out.contiguous()
        alone = ctx.call is not None and not torch.is_grad_enabled()
        if alone and are_ordinary(d_out, dlse, q, k, v, o, lse, saved, alibi, sinks, seed):
            dq, dk, dv, dsinks = _execute.backward_alone(ctx.call, d_out, dlse, q, k, v, o, lse, saved, alibi, sinks, seed)
        else:
            if saved is None:
                saved = _execute.empty_saved(q)
            if number is None:
                number = _execute.empty_number(q, ctx.group)
            if ctx.heads_first:
                d_out, q, k, v, o = _execute.swapped(d_out, q, k, v, o)
            dq, dk, dv, dsinks = attention_backward(
                d_out, dlse, q, k, v, o, lse, saved, number, alibi, sinks, *lists, seed, ctx.text, ctx.group
            )
            if ctx.heads_first:
                dq, dk, dv = _execute.swapped(dq, dk, dv)
        return (None, dq, dk, dv, None, dsinks if sinks is not None else None, *([None] * 8))


# That of the class itself looks for tensors of transforms that have ended, which are not ordinary.
_apply = super(torch.autograd.Function, _Attention).apply


class _Backward(torch.autograd.Function):
    """The op of that name; without it torch takes what the op returns for constants."""

    @staticmethod
    def forward(ctx, keys, *inputs):
        return _below(attention_backward, keys, *inputs)

    @staticmethod
    def backward(ctx, *_):
        raise Unsupported(
            "the gradient of a gradient of attention (create_graph=True, a Hessian, a gradient penalty) is not there; torch's "
            "scaled_dot_product_attention has it with sdpa_kernel(SDPBackend.MATH)"
        )


def _below(op, keys, *inputs):
    with torch._C._AutoDispatchBelowAutograd():
        return op.default.redispatch(keys & torch._C._after_autograd_keyset, *inputs)


def _need_gradients(*tensors):
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


@torch.compiler.disable
def _autograd(keys, q, k, v, alibi, sinks, *rest):
    """Only here it is known whether gradients are needed: under vmap, in a graph that was compiled or exported, tensors do not say it before."""
    *rest, text, group = rest
    needed = _need_gradients(q, k, v, alibi, sinks)
    with _of_all(group, q):
        check_derivatives(q, k, v, sinks, alibi)
        if needed:
            check_slopes(alibi)
    if not needed:
        return _below(attention_forward, keys, q, k, v, alibi, sinks, *rest, text, group)
    return _Attention.apply(keys, q, k, v, alibi, sinks, *rest, with_backward(text), group)


@torch.compiler.disable
def _autograd_of_backward(keys, d_out, dlse, *rest):
    with _of_all(rest[-1], d_out):
        _check_derivatives_of(("the gradient of o", d_out), ("the gradient of lse", dlse))
    if not _need_gradients(*(t for t in (d_out, dlse, *rest) if isinstance(t, torch.Tensor))):
        return _below(attention_backward, keys, d_out, dlse, *rest)
    return _Backward.apply(keys, d_out, dlse, *rest)


def _of_all(group, t):
    """An error inside is that of all ranks, unless t is one of a compiler's, whose ranks do not talk."""
    return together("" if is_fake(t) else group)


def _attend_alone(q, k, v, alibi, sinks, lists, seed, known):
    # Below autograd, in another op for instance, the dispatcher would not come to ours.
    backward = _need_gradients(q, k, v, alibi, sinks) and not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD)
    call = known.call(q, k, v, alibi, sinks, lists, backward)
    swaps = call.heads_first and not _execute.is_in_one(call, alibi, sinks, seed)
    if swaps:
        q, k, v = _execute.swapped(q, k, v)
    if backward:
        check_slopes(alibi)
        o, lse = _apply(None, q, k, v, alibi, sinks, *lists, seed, call, "")
    else:
        o, lse = _execute.forward_alone(call, q, k, v, alibi, sinks, seed)[:2]
    return o.transpose(1, 2) if swaps else o, lse


def attend(q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, spec, group, heads_first):
    """o, in the layout of q, and lse. spec: a text, or of tensors q, k, v that are ordinary a Known."""
    if isinstance(spec, Known):
        none_else = alibi is sinks is cu_q is cu_k is len_q is len_k is start_k is seed is None
        if not group and (none_else or are_ordinary(alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed)):
            return _attend_alone(q, k, v, alibi, sinks, (cu_q, cu_k, len_q, len_k, start_k), seed, spec)
        spec = spec.text
    if heads_first:
        q, k, v = _execute.swapped(q, k, v)
    o, lse, _, _ = attention_forward(q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, seed, spec, group)
    return o.transpose(1, 2) if heads_first else o, lse


_library = torch.library.Library("ringspan", "FRAGMENT")
_library.impl("attention_forward", _autograd, "Autograd", with_keyset=True)
_library.impl("attention_backward", _autograd_of_backward, "Autograd", with_keyset=True)

attention_forward, attention_backward = torch.ops.ringspan.attention_forward, torch.ops.ringspan.attention_backward
