"""python -m ringspan.selftest, alone and under torchrun."""

import os
import subprocess
import sys

import pytest
import torch

ENVIRONMENT = {**{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}, "OMP_NUM_THREADS": "1"}


def _run(*command):
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=1200, env=ENVIRONMENT)


def test_under_torchrun():
    done = _run("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ringspan.selftest", "communication", "basic", "precision")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ok" in done.stdout and "GB/s" in done.stdout and "FAILED" not in done.stdout
    assert done.stdout.count("  ok ") == 6 + 3 + 12


def test_on_the_emulated_device():
    done = _run("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ringspan.selftest", "basic", "--device", "cuda-emulated")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on cuda-emulated" in done.stdout and "all ok" in done.stdout and done.stdout.count("  ok ") == 9


def test_without_a_gpu_a_device_is_refused():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = _run("ringspan.selftest", "basic", "--device", "cuda")
    assert done.returncode == 1 and "torch sees no CUDA device; of ringspan: cuda: " in done.stderr, done.stderr


def test_alone():
    done = _run("ringspan.selftest", "basic")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one rank only" in done.stdout and "all ok" in done.stdout


def test_a_wrong_result_is_noticed():
    """With kernels that lie, it fails."""
    code = """
import sys, torch, ringspan.torch as rt, ringspan.selftest as s
right = rt.attention
rt.attention = lambda *a, **k: right(*a, **k) * 1.001
sys.exit(s.main(["basic"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1200, env=ENVIRONMENT)
    assert done.returncode == 1 and "FAILED" in done.stdout, done.stdout + done.stderr


def test_unknown_parts_are_refused():
    done = _run("ringspan.selftest", "speed")
    assert done.returncode == 2 and "communication, basic, precision, performance" in done.stderr
