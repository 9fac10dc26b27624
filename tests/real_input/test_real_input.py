"""Attention on the q, k, v of a real model over a long real text, forward and backward, judged by float64.

The files are too large for the repository: 16,384 tokens in one sequence (kjv-long) and 263 packed documents (kjv-packed),
bfloat16, 12 heads of 32. They are looked for in RINGSPAN_DATA, or in ../shared/data beside the repository; without them the
test is skipped (exit code 77). examples/data holds short cuts of them, which scripts/demo runs.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
DATA = pathlib.Path(os.environ.get("RINGSPAN_DATA", ROOT.parent / "shared" / "data"))
PROGRAM = os.environ.get("RINGSPAN_PROGRAM", "ringspan")
LONG, PACKED = DATA / "kjv-long.safetensors", DATA / "kjv-packed.safetensors"
SKIPPED = 77


class RealInput(unittest.TestCase):
    def check(self, source, pattern, strategy, sharding, *more, sampled):
        with tempfile.TemporaryDirectory(prefix="ringspan-real-") as folder:
            output = pathlib.Path(folder, "out.safetensors")
            command = [PROGRAM, "run", "--input", source, "--output", output, "--grad", "random:1", "--verify", "--json",
                       "--ranks", "4", "--pattern", pattern, "--strategy", strategy, "--sharding", sharding, *more]  # fmt: skip
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            self.assertTrue(output.exists())
            report = json.loads(done.stdout)
        verified = report["verification"]
        self.assertTrue(verified["passed"])
        self.assertEqual(verified["sampled"], sampled)
        self.assertEqual([t["name"] for t in verified["tensors"]], ["o", "lse", "dq", "dk", "dv"])
        for tensor in verified["tensors"]:
            self.assertGreater(tensor["elements"], 0)
            self.assertEqual(tensor["failures"], 0)
        for rank in report["by_rank"]:
            self.assertGreater(rank["sent_bytes"], 0)
            self.assertLess(rank["memory_bytes"]["all"], report["one_rank_memory_bytes"])
        print(f"{source.name}, {pattern}, {report['strategy']}: {report['seconds']:.1f} s, "
              f"verified in {verified['seconds']:.1f} s", flush=True)  # fmt: skip

    def test_one_long_causal_sequence_round_a_ring(self):
        self.check(LONG, "causal", "ring", "zigzag", sampled=True)

    def test_one_long_sequence_dilated(self):
        self.check(LONG, "dilated:1024x1,4096x2,16384x8@longnet", "exchange", "contiguous", sampled=True)

    def test_packed_documents_with_the_strategy_that_the_planner_chooses(self):
        self.check(PACKED, "causal & documents", "auto", "contiguous", sampled=False)

    def test_packed_documents_dilated_over_processes(self):
        pattern = "dilated:256x1,512x2,1024x4,2048x8@longnet@global & causal & documents"
        self.check(PACKED, pattern, "all-gather", "striped", "--transport", "processes", sampled=False)


if __name__ == "__main__":
    if not (LONG.exists() and PACKED.exists()):
        print(f"skipped: {LONG.name} and {PACKED.name} are not in {DATA}; RINGSPAN_DATA names another folder")
        sys.exit(SKIPPED)
    unittest.main()
