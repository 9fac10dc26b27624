"""Ranks that are gone before a group is first used, or while messages are handed to it; what signals' handlers raise there."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from worlds import try_ranks

import ringspan
import ringspan.torch as rt
from ringspan.torch import _transport


def _first_call(rank, ranks, number):
    """A new group's first call, when rank 0, which holds the store, gets a signal before it."""
    q = torch.ones(1, 8, 2, 8)
    group = dist.new_group(list(range(ranks)))
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["made"])
        time.sleep(0.2)
        os.kill(os.getpid(), number)
    store.set("made", "")  # until then making a group needs the store
    time.sleep(1.0)  # until rank 0 is gone, and its connections are lost
    with pytest.raises(ringspan.CommError) as caught:
        rt.attention(q, q, q, causal=True, group=group, deadline=2.0)
    return str(caught.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_store_is_gone_before_the_first_call(number):
    """Torch's store waits for minutes for whoever holds it."""
    _, (kind, text) = try_ranks(2, _first_call, number, missing=[0], timeout=60.0)
    assert kind == "value", text[2]
    assert ("no sign of life" in text) == (number == signal.SIGSTOP), text


def _found_gone(rank, ranks, gives_up):
    """Rank 1 is killed, perhaps after it gave up a call in which it was alone; the others call when it is gone."""
    q = torch.ones(1, 8, 2, 8)
    group = dist.group.WORLD
    rt.attention(q, q, q, group=group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        if gives_up:
            with pytest.raises(ringspan.CommError, match="no sign of life"):
                rt.attention(q, q, q, group=group, deadline=0.5)
            dist.PrefixStore("ringspan", group.get_group_store()).wait(["abort"])
        store.set("gone", "")
        os.kill(os.getpid(), signal.SIGKILL)
    store.wait(["gone"])
    time.sleep(0.5)
    with pytest.raises(ringspan.CommError) as caught:
        rt.attention(q, q, q, group=group)
    return str(caught.value)


@pytest.mark.parametrize("gives_up", [False, True])
def test_a_peer_that_takes_no_message_is_named(gives_up):
    outcomes = try_ranks(3, _found_gone, gives_up, missing=[1])
    for rank in 0, 2:
        kind, text = outcomes[rank]
        assert kind == "value", text[2]
        assert ("rank 1 failed: " if gives_up else "lost the connection to rank 1: ") in text, text
        assert ("no sign of life" in text) == gives_up and text.startswith(f"rank {rank}/3: "), text


def _handler(number, _):
    raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(143)


def _interrupted(rank, ranks, number):
    """Rank 0 gets a signal while messages are handed to the group: what each rank raises."""
    q = torch.ones(1, 8, 2, 8)
    group = dist.group.WORLD
    rt.attention(q, q, q, group=group)
    if rank == 0:
        signal.signal(number, _handler)
        transport = _transport.transport_of(group.group_name)
        waiter = transport._waiter
        transport._waiter = lambda *args: signal.raise_signal(number) or waiter(*args)
    try:
        rt.attention(q, q, q, group=group)
    except BaseException as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("number, name", [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")])
def test_what_a_handler_raises_is_not_swallowed(number, name):
    (_, first), (_, second) = try_ranks(2, _interrupted, number)
    assert first == (name, "143" if name == "SystemExit" else ""), first
    assert second[0] == "CommError" and "rank 0 aborted: interrupted" in second[1], second


class _Wake:
    """The queue that wakes the watcher; a signal comes when the first word is put into it."""

    def __init__(self, queue, number):
        self.queue, self.numbers, self.get = queue, [number], queue.get

    def put(self, item):
        if self.numbers:
            signal.raise_signal(self.numbers.pop())
        self.queue.put(item)


def _interrupted_in_failure(rank, ranks):
    """Rank 0 gives up a call in which it is alone, and gets a signal when it is about to say so."""
    q = torch.ones(1, 8, 2, 8)
    group = dist.group.WORLD
    rt.attention(q, q, q, group=group)
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        signal.signal(signal.SIGTERM, _handler)
        transport = _transport.transport_of(group.group_name)
        transport._wake = _Wake(transport._wake, signal.SIGTERM)
    else:
        store.wait(["given up"])
    try:
        rt.attention(q, q, q, group=group, deadline=0.5 if rank == 0 else 60.0)
    except BaseException as error:
        store.set("given up", "")
        return type(error).__name__, str(error)
    return None


def test_what_a_handler_raises_beside_a_failure_is_not_swallowed():
    (_, first), (_, second) = try_ranks(2, _interrupted_in_failure)
    assert first == ("SystemExit", "143"), first
    assert second[0] == "CommError" and "rank 0 failed: " in second[1] and "no sign of life" in second[1], second


_KEPT = """
import sys, torch, torch.distributed as dist
from ringspan.torch import _transport, attention
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(1, 8, 2, 8)
attention(x, x, x, group=dist.group.WORLD)
sys.kept = _transport, _transport.transport_of(dist.group.WORLD.group_name)
"""


def test_a_group_that_outlives_its_transport_at_exit():
    """As where a thread that waits for the store has the transport; nobody destroyed the group."""
    done = subprocess.run([sys.executable, "-c", _KEPT], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr, done.stderr
