"""From the arguments of attention to a Pattern."""

import functools

from ._core import Pattern
from .errors import InvalidArgument


def window_pair(window):
    """(left, right), -1: no bound; None: no window."""
    if window is None:
        return None
    if isinstance(window, int) and not isinstance(window, bool):
        raise InvalidArgument(f"window ({window}) must be a pair (left, right); -1 means no bound on that side")
    try:
        left, right = window
    except (TypeError, ValueError):
        raise InvalidArgument(f"window ({window!r}) must be a pair (left, right); -1 means no bound on that side") from None
    if not all(isinstance(bound, int) and bound >= -1 for bound in (left, right)):
        raise InvalidArgument(f"window ({window!r}) must be a pair of integers >= -1; -1 means no bound on that side")
    return None if (left, right) == (-1, -1) else (left, right)


@functools.lru_cache(maxsize=256)
def combined(text, causal, window, documents):
    """The pattern of `text` with the terms that are arguments of their own. The result is shared: do not change it."""
    pattern = Pattern(text or "full")
    if causal:
        pattern.causal = True
    if window is not None:
        if pattern.window is not None and pattern.window != window:
            raise InvalidArgument(f"window {window} contradicts the one in pattern '{text}'; give one of them")
        pattern.window = window
    if documents:
        pattern.documents = True
    elif pattern.documents:
        raise InvalidArgument(f"pattern '{text}' has documents, so cu_seqlens must be given")
    return pattern
