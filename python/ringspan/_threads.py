"""How many threads the kernels of one rank use."""

import functools
import os
import sys

from . import _check, _core

_threads = None
_own = False


def checked_threads(n):
    return _check.integer(n, "threads", 1, _core.MAX_THREADS)


def set_num_threads(n: int | None, *, own: bool = False) -> None:
    """Sets the number of threads of each rank's kernels; None: the default again (torch's, else OMP_NUM_THREADS, else the cores).

    Where it is torch's number, too, they are the threads that torch computes on (OpenMP's): those look for work for milliseconds after
    an operation, and would keep others from the cores. own=True: threads of ringspan's in any case. Results are the same, to the bit.
    """
    global _threads, _own
    threads = None if n is None else checked_threads(n)
    _own = _check.flag(own, "own")
    _threads = threads


def are_torchs(threads: int) -> bool:
    """Whether so many threads are to be those of torch."""
    torch = sys.modules.get("torch")
    return not _own and torch is not None and threads == torch.get_num_threads() and _torch_has_openmp()


@functools.cache
def _torch_has_openmp():
    return sys.modules["torch"].backends.openmp.is_available()


def num_threads() -> int:
    """The number of threads of each rank's kernels."""
    if _threads is not None:
        return _threads
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "get_num_threads"):
        return max(1, torch.get_num_threads())
    text = os.environ.get("OMP_NUM_THREADS", "")
    if text.isdigit() and int(text) > 0:
        return int(text)
    return max(1, len(os.sched_getaffinity(0)))
