"""What the rest of the package may ask of a group: to pass an error on to all of its ranks, its deadline, its communicator."""

import contextlib

import torch

from .._check import positive
from . import _sessions, _transport

_deadline = 60.0


def set_deadline(seconds: float) -> None:
    """How long another rank may show no sign of life before a call on a group fails (60 at first).

    A rank shows life while it is inside ringspan. One that does something else for longer (writes a checkpoint, evaluates) needs a
    longer deadline on the others.
    """
    global _deadline
    _deadline = positive(seconds, "the deadline")


def deadline() -> float:
    return _deadline


def name_of(group) -> str:
    """The name by which the ops know a process group or a dimension of a DeviceMesh."""
    return _transport.name_of(_transport.group_of(group))


def communicator_of(group):
    """The library's communicator on the group."""
    return _sessions.group_named(name_of(group)).core


@torch.compiler.disable  # it comes here, too, where a graph breaks at the error
def refuse(name, error):
    """Takes part in the call of attention that the other ranks of the group make, with this rank's error: all raise it."""
    _sessions.group_named(name).refuse(error, _deadline)


@torch.compiler.disable
def meet(group, what, tokens=0):
    """Before a collective of the process group, which has neither our deadline nor our errors: raises on all ranks unless all are about
    to do `what`. Returns the tokens of every rank."""
    return _sessions.group_named(name_of(group)).meet(what, tokens, _deadline)


@contextlib.contextmanager
def together(group):
    """An error of one rank inside is raised on all, instead of leaving the others waiting, unless they wait in a collective inside.
    group: None where this process is alone."""
    try:
        yield
    except Exception as error:
        if group is not None:
            refuse(name_of(group), error)
        raise
