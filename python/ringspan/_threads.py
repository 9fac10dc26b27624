"""How many threads the kernels of one rank use."""

import os

from . import _check, _core

_threads = None


def checked_threads(n):
    return _check.integer(n, "threads", 1, _core.MAX_THREADS)


def set_num_threads(n: int | None) -> None:
    """Sets the number of threads of each rank's kernels; None: the default again (OMP_NUM_THREADS, else the cores)."""
    global _threads
    _threads = None if n is None else checked_threads(n)


def num_threads() -> int:
    """The number of threads of each rank's kernels."""
    if _threads is not None:
        return _threads
    import sys

    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return max(1, torch.get_num_threads())
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    return max(1, len(os.sched_getaffinity(0)))
