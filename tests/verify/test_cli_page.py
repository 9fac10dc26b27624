"""Runs every command line of docs/cli.md, on small inputs, and checks its tables against the program. Standard library only."""

import os
import pathlib
import random
import re
import shlex
import struct
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["RINGSPAN_PROGRAM"]
PAGE = pathlib.Path(os.environ["RINGSPAN_SOURCE"], "docs", "cli.md").read_text(encoding="utf-8")


def write_input(path, tokens, documents):
    draw = random.Random(1)
    tensors = {}
    for name in "qkv":
        values = [draw.gauss(0, 1) for _ in range(tokens * 4 * 16)]
        tensors[name] = ("F32", [1, tokens, 4, 16], struct.pack(f"<{len(values)}f", *values))
    if documents:
        tensors["cu_seqlens"] = ("I32", [len(documents)], struct.pack(f"<{len(documents)}i", *documents))
    entries, data = [], b""
    for name, (dtype, shape, payload) in tensors.items():
        entries.append(f'"{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{len(data)},{len(data) + len(payload)}]}}')
        data += payload
    header = ("{" + ",".join(entries) + "}").encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


class CliPage(unittest.TestCase):
    def run_program(self, arguments, folder=None):
        return subprocess.run([PROGRAM, *arguments], cwd=folder, capture_output=True, text=True, timeout=500, check=False)

    def test_every_command_line_runs(self):
        lines = [line.strip() for line in PAGE.splitlines() if line.startswith("    ringspan ") and "error:" not in line]
        self.assertGreater(len(lines), 14)
        commands = {shlex.split(line)[1] for line in lines}
        self.assertEqual(commands, {"run", "plan", "verify", "bench", "capabilities", "selftest", "inspect", "doctor", "tune"})
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            write_input(folder / "qkv.safetensors", 200, None)
            write_input(folder / "packed.safetensors", 200, [0, 31, 31, 150, 200])
            for line in lines:
                with self.subTest(line):
                    done = self.run_program(shlex.split(line)[1:], folder)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_error_that_points_at_the_character(self):
        done = self.run_program(["plan", "--tokens", "9", "--pattern", "window:5"])
        self.assertEqual(done.returncode, 2)
        shown = "\n".join("    " + line for line in done.stderr.splitlines()[:3])
        self.assertIn(shown, PAGE)

    def test_the_exit_codes_are_those_of_the_help(self):
        help_text = self.run_program(["--help"]).stdout
        rows = PAGE.split("## Exit codes")[1].split("##")[0].splitlines()
        codes = [row.split("|")[1].strip() for row in rows if row.startswith("| ") and row[2].isdigit()]
        self.assertEqual(codes, ["0", "1", "2", "3", "4", "5", "6", "7", "70", "130"])
        listed = help_text.split("exit codes")[1].split()
        for code in codes:
            self.assertIn(code, listed)

    def test_every_option_of_every_command_is_on_the_page(self):
        for command in ("run", "plan", "verify", "bench", "capabilities", "selftest", "inspect", "doctor"):
            options = self.run_program([command, "--help"]).stdout.split("options\n", 1)[1]
            found = re.findall(r"^  (?:-h )?(--[a-z-]+)", options, re.MULTILINE)
            self.assertIn("--help", found)
            for option in found:
                with self.subTest(command, option=option):
                    self.assertRegex(PAGE, rf"`{option}\b")

    def test_every_word_of_a_problem_is_known(self):
        table = PAGE.split("## verify")[1].split("    ringspan verify")[0]
        words = [word for row in table.splitlines() if row.startswith("| `") for word in row.split("|")[1].split("`")[1::2]]
        self.assertGreater(len(words), 30)
        for word in words:
            with self.subTest(word):
                done = self.run_program(["verify", f"nq=4 h=1 d=4 {word}=" if word not in ("nq", "h", "d") else f"{word}="])
                self.assertEqual(done.returncode if word != "kernel" else 2, 2)
                self.assertNotIn("unknown word", done.stderr)


if __name__ == "__main__":
    unittest.main()
