"""Runs the command lines of docs/mission.md: test_commands.py short|long. `long` are those with a memory budget."""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import unittest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "mission.md"
PROGRAM = os.environ.get("RINGSPAN_PROGRAM", "ringspan")
LONG_GIB = 8
LONG = len(sys.argv) > 1 and sys.argv.pop(1) == "long"


def commands():
    """(heading, words) of every indented `ringspan ...` line of the page."""
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif re.match(r"    ringspan ", line):
            yield heading, shlex.split(line)


def available_gib():
    """Memory that can be had without swapping; infinite where the system does not say."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) / 2**20
    except (OSError, StopIteration):
        return float("inf")


class Commands(unittest.TestCase):
    def test_every_variant_has_one(self):
        headings = {heading for heading, _ in commands()}
        for variant in ("V2 collective", "Robust", "DeepSpeed", "FairScale", "FSDP", "Fixed", "True", "V3"):
            self.assertIn(variant, headings)

    def test_run(self):
        chosen = [(h, words) for h, words in commands() if ("--memory" in words) == LONG]
        self.assertTrue(chosen)
        # 6.2 GiB were seen at the peak of the larger one.
        if LONG and available_gib() < LONG_GIB:
            self.skipTest(f"the long command lines need {LONG_GIB} GiB of free memory; there are {available_gib():.1f}")
        for heading, words in chosen:
            with self.subTest(heading, command=shlex.join(words)):
                done = subprocess.run([PROGRAM, *words[1:]], capture_output=True, text=True, check=False)
                print(shlex.join(words), done.stdout, done.stderr, sep="\n", flush=True)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
