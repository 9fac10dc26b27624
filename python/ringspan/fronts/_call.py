"""What the fronts share: the call of ringspan.torch.attention, and checks of arguments."""

import contextlib

from .._check import integer
from ..errors import InvalidArgument, Unsupported


def attend(q, k, v, **arguments):
    from ..torch import attention  # late: the fronts' signatures can be imported and read without torch

    return attention(q, k, v, **arguments)


def together(group):
    """As in ringspan.torch._group."""
    if group is None:  # then without torch
        return contextlib.nullcontext()
    from ..torch import _group

    return _group.together(group)


def meet(group, what):
    """Before a collective of the process group: raises on all ranks unless all are about to do `what`."""
    from ..torch import _group

    _group.meet(group, what)


def refuse(argument, value, alternative):
    """Raises: the argument is understood, but not done here."""
    raise Unsupported(f"{argument} ({value}) is not supported; {alternative}")


def window_of(window_size):
    """flash-attn's (left, right), where any negative number means no bound, as attention() wants it."""
    try:
        left, right = (integer(bound, "window_size") for bound in window_size)
    except (TypeError, ValueError, InvalidArgument):
        raise InvalidArgument(f"window_size ({window_size!r}) must be a pair of integers (left, right)") from None
    return None if left < 0 and right < 0 else (max(left, -1), max(right, -1))


def world_group(group, function):
    """The process group that `function` works in: None means all ranks, as in torch.distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise InvalidArgument(
            f"{function} works on the shards of a process group, but torch.distributed is not initialized: call "
            "torch.distributed.init_process_group first, or use ringspan.torch.attention for local attention"
        )
    return group if group is not None else dist.group.WORLD


def unpack(packed, name, count, dim):
    """q, k, v of a tensor that holds `count` of them along `dim`; views."""
    if packed.dim() != dim + 3 or packed.shape[dim] != count:
        raise InvalidArgument(f"{name} has shape {tuple(packed.shape)}; expected {dim + 3} dimensions, of which dimension {dim} is {count}")
    return packed.unbind(dim)


def probabilities(return_attn_probs, dropout_p):
    """Checks return_attn_probs: lse is returned, the dropout mask of flash-attn's kernel never."""
    if return_attn_probs and dropout_p > 0:
        refuse("return_attn_probs=True with dropout_p", dropout_p,
               "S_dmask is a debug output of flash-attn's kernel; lse is returned with dropout_p=0")  # fmt: skip
    return bool(return_attn_probs)


def check_offsets(name, offsets, tokens, max_seqlen, max_name):
    """cu_seqlens as a list of integers; raises where they do not describe `tokens` tokens in documents of at most max_seqlen."""
    values = [int(x) for x in (offsets.tolist() if hasattr(offsets, "tolist") else offsets)]
    if len(values) < 2 or values[0] != 0:
        raise InvalidArgument(f"{name} ({_short(values)}) must begin with 0 and have one entry more than there are sequences")
    lengths = [b - a for a, b in zip(values, values[1:])]
    if min(lengths) < 0:
        raise InvalidArgument(f"{name} ({_short(values)}) must not descend")
    if tokens is not None and values[-1] != tokens:
        raise InvalidArgument(
            f"{name} ends at {values[-1]}; it must end at the number of tokens ({tokens}): make padding a sequence of its own"
        )
    if max_seqlen is not None and int(max_seqlen) < max(lengths):
        raise InvalidArgument(f"{max_name} ({int(max_seqlen)}) must be at least the longest sequence of {name} ({max(lengths)})")
    return values


def _short(values):
    return str(values) if len(values) <= 8 else f"[{', '.join(str(x) for x in values[:7])}, ...]"
