"""Runs the program and judges what comes back."""

import json
import math
import os
import shutil
import subprocess
import tempfile
import unittest

import safetensors_file

PROGRAM = os.environ.get("RINGSPAN_PROGRAM", "ringspan")
os.environ["RINGSPAN_TUNE_FILE"] = ""  # what was tuned on this machine is not what is tested
os.environ["TERM"] = "xterm"  # whose lines can be rewritten

OK, FAILED, ARGUMENTS, UNSUPPORTED, MEMORY, COMMUNICATION, INPUT_OUTPUT, INTERRUPTED = 0, 1, 2, 3, 4, 5, 6, 130


def call(*arguments, **options):
    """CompletedProcess of the program, as text."""
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, timeout=1200, check=False, **options)


class ProgramTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="ringspan-cli-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write(self, name, tensors, metadata=None):
        return safetensors_file.write(self.path(name), tensors, metadata)

    def run_program(self, *arguments, code=OK, **options):
        result = call(*arguments, **options)
        self.assertEqual(result.returncode, code, f"{arguments}\n{result.stdout}\n{result.stderr}")
        return result

    def run_json(self, *arguments, code=OK):
        return json.loads(self.run_program(*arguments, "--json", code=code).stdout)

    def assert_close(self, actual, expected, tolerance, what):
        self.assertEqual(len(actual), len(expected), what)
        for index, (a, b) in enumerate(zip(actual, expected)):
            if a == b:
                continue
            error = abs(a - b)
            self.assertTrue(
                math.isfinite(error) and error <= tolerance * max(1.0, abs(b)), f"{what}[{index}]: {a} instead of {b}"
            )
