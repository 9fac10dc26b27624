"""What this machine can do: builds and runs peak.cc."""

import json
import subprocess
import tempfile
from pathlib import Path


def measure_peaks(only=None):
    """Rates of one thread (see peak.cc), or {} where there is no compiler. only="read": reading memory alone."""
    source = Path(__file__).resolve().parent / "peak.cc"
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "peak"
        try:
            subprocess.run(["c++", "-std=c++20", "-O3", "-march=native", "-o", str(program), str(source)], check=True)
        except (OSError, subprocess.CalledProcessError):
            return {}
        command = [str(program)] + ([only] if only else [])
        # Other work on the machine only ever takes away from a rate: the best of a few runs.
        runs = [json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(3)]
        return best_of(*runs)


def best_of(*peaks):
    return {name: max(peak.get(name, 0.0) for peak in peaks) for name in peaks[0]}


def peak_of(peaks, dtype):
    """GFLOP/s of the fastest way to multiply operands of the type that has one product per element."""
    best = peaks.get("float32_gflops", 0.0)
    if dtype == "bfloat16":
        best = max(best, peaks.get("bfloat16_dot_gflops", 0.0), peaks.get("bfloat16_tile_gflops", 0.0))
    return best
