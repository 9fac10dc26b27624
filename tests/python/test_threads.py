"""Whose threads compute: where their number is torch's, torch's own."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

import ringspan
import ringspan.torch as rt

_COUNTED = """
import os, sys
import torch
import ringspan.torch as rt

threads, own = int(sys.argv[1]), sys.argv[2] == "own"
torch.set_num_threads(2)
rt.set_num_threads(threads, own=own)
running = lambda: len(os.listdir("/proc/self/task"))
x = torch.randn(1, 700, 4, 32, requires_grad=True)
torch.nn.functional.silu(torch.randn(512, 4096))  # and with it torch's threads
before = running()
rt.attention(x, x, x, causal=True).sum().backward()
print(running() - before)
"""


def _started(threads, own):
    """How many threads a call starts in a process whose torch has two."""
    done = subprocess.run([sys.executable, "-c", _COUNTED, str(threads), own], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.skipif(not torch.backends.openmp.is_available(), reason="this torch has no OpenMP")
def test_threads_are_those_of_torch():
    # An autograd thread may be among what backward starts; it is the same in both.
    with_torchs, with_own = _started(2, "torch"), _started(2, "own")
    assert with_own == with_torchs + 1
    assert _started(3, "torch") == _started(3, "own") == with_torchs + 2  # not torch's number


def test_bits_do_not_depend_on_whose_threads():
    before = torch.get_num_threads()

    def computed(own):
        rt.set_num_threads(2, own=own)
        results = []
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(3)
            q, k, v = (torch.randn(1, 300, heads, 48).to(dtype).requires_grad_() for heads in (4, 2, 2))
            o = rt.attention(q, k, v, causal=True)
            results += [o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))]
        return results

    try:
        torch.set_num_threads(2)
        assert all(map(torch.equal, computed(False), computed(True)))
    finally:
        torch.set_num_threads(before)
        rt.set_num_threads(None)


def _in_a_child(expected):
    x = torch.ones(1, 257, 4, 16)
    os._exit(0 if torch.equal(rt.attention(x, x, x, causal=True), expected) else 3)


def test_a_forked_process_has_threads_of_its_own():
    """OpenMP's of the parent may not be used there: GCC's would wait for ever."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.nn.functional.silu(torch.randn(512, 4096))
        x = torch.ones(1, 257, 4, 16)
        expected = rt.attention(x, x, x, causal=True)
        rt.forget_plans()  # the child makes its own
        child = multiprocessing.get_context("fork").Process(target=_in_a_child, args=(expected,))
        child.start()
        child.join(60)
        code = child.exitcode
        if code is None:
            child.kill()
        assert code == 0
    finally:
        torch.set_num_threads(before)


def test_own_is_a_flag():
    with pytest.raises(ringspan.InvalidArgument, match=r"own \('yes'\) must be True or False"):
        rt.set_num_threads(2, own="yes")
