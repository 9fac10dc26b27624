"""What this machine can do, and whether it does it now: builds and runs peak.cc and tile_registers.cc."""

import concurrent.futures
import ctypes
import functools
import json
import os
import platform
import subprocess
import tempfile
import threading
from pathlib import Path


def cpu_model():
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def describe_machine():
    import torch

    return {"cpu": cpu_model(), "cores": os.cpu_count(), "torch": torch.__version__,
            "torch_isa": torch.backends.cpu.get_cpu_capability(), "load": os.getloadavg()[0]}


def build(target, *flags, source="peak.cc"):
    source = Path(__file__).resolve().parent / source
    subprocess.run(["c++", "-std=c++20", "-O3", "-march=native", "-pthread", *flags, "-o", str(target), str(source)], check=True)


def load(source):
    """A source as a library: what takes turns with other calls."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            build(Path(folder) / "library.so", "-shared", "-fPIC", source=source)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"{source} needs a C++ compiler, and what it asks of the machine: {error}") from error
        return ctypes.CDLL(str(Path(folder) / "library.so"))


@functools.cache
def library():
    built = load("peak.cc")
    built.float32_rate_now.restype = built.read_memory.restype = ctypes.c_double
    built.run_loop.argtypes = [ctypes.c_char_p, ctypes.c_double]
    return built


def measure_peaks():
    """Rates of one thread (see peak.cc), or {} where there is no compiler."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        try:
            build(program)
        except (OSError, subprocess.CalledProcessError):
            return {}
        # Other work on the machine only ever takes away from a rate: the best of a few runs.
        runs = [json.loads(subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout) for _ in range(3)]
        return best_of(*runs)


class Quiet:
    """Whether the machine has `share` of its best float32 rate: other work on it, on the same core or its clock, takes some away.
    Asking it does not depend on what is measured between two questions. Of several threads each must have it: virtual cores may lie
    on one real one for a while, which no count of the machine shows."""

    def __init__(self, share):
        self._rate = library().float32_rate_now
        self.share = share
        self.best = max(self._rate() for _ in range(200))
        self.turns = self.disturbed_turns = self.disturbed_cases = 0

    def now(self, threads=1):
        together = threading.Barrier(threads)

        def rate_beside_others():
            together.wait()
            return self._rate()

        # This thread among them: it goes on to what is measured, and should not have slept.
        with concurrent.futures.ThreadPoolExecutor(max(threads - 1, 1)) as pool:
            others = [pool.submit(rate_beside_others) for _ in range(threads - 1)]
            rates = [rate_beside_others(), *(other.result() for other in others)]
        self.best = max(self.best, *rates)
        return min(rates) >= self.share * self.best

    def report(self):
        return {"share": self.share, "best_gflops": self.best, "turns": self.turns, "disturbed_turns": self.disturbed_turns,
                "cases_without_enough_quiet_turns": self.disturbed_cases}


class SharedTiles:
    """Instead of a Quiet: counts every turn, and tells afterwards beside which another thread of the core used tiles of AMX."""

    def __init__(self):
        self._shared = load("tile_registers.cc").tiles_are_shared
        self._told = []
        self.turns = self.disturbed_turns = self.disturbed_cases = 0

    def now(self, threads=1):
        self._told.append(self._shared())
        return True

    def split(self, values):
        """Of one value per turn: those alone on the core, those beside; turns that began and ended so."""
        told = list(zip(values, self._told, self._told[1:]))
        return [[value for value, begin, end in told if begin == end == shared] for shared in (0, 1)]


def best_of(*peaks):
    return {name: max(peak.get(name, 0.0) for peak in peaks) for name in peaks[0]}


def fastest_loop(peaks, dtype):
    """The loop of peak.cc that is the fastest way to multiply operands of the type that has one product per element."""
    names = ["float32"] + (["bfloat16_dot", "bfloat16_tile"] if dtype == "bfloat16" else [])
    return max(names, key=lambda name: peaks.get(f"{name}_gflops", 0.0))
