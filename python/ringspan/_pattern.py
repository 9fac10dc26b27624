"""From the arguments of attention to a Pattern."""

import copyreg
import functools

from ._check import flag, integer, text
from ._core import Pattern
from .errors import InvalidArgument

copyreg.pickle(Pattern, lambda pattern: (Pattern, (str(pattern),)))  # copies, too: a module that holds one is copied and saved


_FARTHEST = 2**48  # the core's, far beyond the tokens of any problem: what reaches farther has no bound


def window_pair(window):
    """(left, right), -1: no bound; None: no window."""
    if window is None:
        return None
    expected = "must be a pair (left, right) of integers >= -1 and < 2^63; -1 means no bound on that side"
    try:
        left, right = window
    except (TypeError, ValueError):
        raise InvalidArgument(f"window ({window!r}) {expected}") from None
    try:
        left, right = integer(left, "left", -1), integer(right, "right", -1)
    except InvalidArgument:
        raise InvalidArgument(f"window ({window!r}) {expected}") from None
    left, right = (-1 if side > _FARTHEST else side for side in (left, right))
    return None if (left, right) == (-1, -1) else (left, right)


def text_of(pattern):
    """Of a Pattern or its text; "": none is given."""
    given = "" if pattern is None else pattern if isinstance(pattern, str) else str(pattern)
    return text(given, "pattern", "; its terms are joined by '&'")


def causal_flag(causal):
    return flag(causal, "causal", "; pattern='causal@top_left' begins at the upper left corner")


def pattern_of(pattern, causal, window, documents):
    """The Pattern of the arguments as they are given. It is shared: do not change it."""
    return combined(text_of(pattern), causal_flag(causal), window_pair(window), documents)


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
