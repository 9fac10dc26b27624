"""Ranks that are gone before a group is first used, or while messages are handed to it; exceptions that signals' handlers raise there."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from worlds import try_ranks

import ringspan
import ringspan.torch as rt


def _first_call(rank, ranks, number):
    """A new group's first call, when rank 0, which holds the store, gets a signal before it."""
    q = torch.ones(1, 8, 2, 8)
    group = dist.new_group(list(range(ranks)))
    if rank == 0:
        os.kill(os.getpid(), number)
    time.sleep(0.5)  # until its connections are lost
    with pytest.raises(ringspan.CommError) as caught:
        rt.attention(q, q, q, causal=True, group=group, deadline=2.0)
    return str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_store_is_gone_before_the_first_call(number):
    """Torch's store waits for minutes for whoever holds it."""
    _, (kind, text) = try_ranks(2, _first_call, number, missing=[0], timeout=60.0)
    assert kind == "value", text[2]
    assert ("no sign of life" in text) == (number == signal.SIGSTOP), text
