"""Collectives of torch.distributed, after which a process may end.

A thread of gloo lets go of a collective's tensors some time after the collective has returned. Where it is the last to do so it takes
the interpreter's lock, and if the interpreter goes down meanwhile, the process is aborted: with all its work done. So collectives get
tensors of their own here (the same memory), and the interpreter's end waits until nobody has them any more.
"""

import atexit
import time
import weakref

import torch
import torch.distributed as dist

_MOST_SECONDS = 5.0  # at the end, where a collective hangs
_held = []  # weak references to tensors that a thread may have


def _own(tensor):
    alias = tensor.detach()
    _held.append(weakref.ref(alias))
    return alias


def _drop_ended():
    _held[:] = [reference for reference in _held if reference() is not None]


@torch.compiler.disable
def all_reduce(tensor, group):
    """In place, the sum over the ranks."""
    _drop_ended()
    dist.all_reduce(_own(tensor), group=group)


@torch.compiler.disable
def all_gather(parts, tensor, group):
    """Into `parts`, one tensor per rank, each rank's tensor; all have one shape."""
    _drop_ended()
    dist.all_gather([_own(part) for part in parts], _own(tensor), group=group)


@atexit.register
def wait_for_threads():
    """Until no collective's tensor is held any more, or _MOST_SECONDS."""
    end = time.monotonic() + _MOST_SECONDS
    while time.monotonic() < end:
        _drop_ended()
        if not _held:
            return
        time.sleep(0.001)
