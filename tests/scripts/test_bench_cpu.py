"""bench/cpu and bench/ranks without PyTorch and without measuring: what is refused first, what --floor judges, where results go."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import types
import unittest
from unittest import mock

from trees import ROOT, InFolder

CPU = ROOT / "bench/cpu"
COMPARE = CPU / "compare"
CASE = {"pass": "forward", "dtype": "float32", "mask": "full", "tokens": 64, "head_dim": 64, "ratio": 2.0}
ROW = {"name": "2 ranks", "dtype": "float32", "ratio": 0.5}


class Refused(InFolder):
    def setUp(self):
        super().setUp()
        (self.folder / "lib.so").touch()
        for name in ("torch", "ringspan", "ringspan/torch", "matplotlib"):  # what is imported before arguments are read
            (self.folder / "stubs" / name).mkdir(parents=True)
            (self.folder / "stubs" / name / "__init__.py").write_text(
                "def __getattr__(name): return {} if name == 'rcParams' else lambda *words: None\n", encoding="utf-8")
        (self.folder / "stubs/matplotlib/pyplot.py").touch()
        self.environment = {**os.environ, "PYTHONPATH": str(self.folder / "stubs"), "PYTHONDONTWRITEBYTECODE": "1"}

    def python(self, program, *words):
        return self.call(sys.executable, program, *words, env=self.environment)

    def test_before_anything_is_measured(self):
        packed = self.folder / "lib.so"
        for words in (
            ["--json", "absent/x.json"], ["--json", "."], ["--floor", "nan"], ["--repeats", "0"], ["--threads", "0"],
            ["--tokens", "0"], ["--tokens", "1.5"], ["--head-dim", "-1"], ["--batch", "0"], ["--seconds", "-1"],
            ["--seconds", "inf"], ["--library", "absent.so"],
            ["--heads", "3", "--kv-heads", "2"], ["--packed", packed], ["--packed", packed, "--group", "ranks"],
        ):  # fmt: skip
            with self.subTest(words):
                done = self.python(COMPARE, *([] if "--library" in words else ["--library", "lib.so"]), *words)
                self.assertEqual(done.returncode, 2)
                self.assert_refused(done, *words[:2])

    def test_the_other_programs(self):
        for program, *words in (
            ("builds", "--json", "absent/x.json", "lib.so", "lib.so"), ("builds", "--heads", "0", "lib.so", "lib.so"),
            ("builds", "absent.so", "lib.so"), ("builds", "--kv-heads", "3", "lib.so", "lib.so"),
            ("builds", "--by-tiles", "lib.so", "lib.so", "--threads", "2"),
            ("calls", "--json", "absent/x.json"), ("calls", "--processes", "0"), ("threads", "--json", "absent/x.json"), ("threads", "--threads", "0"),
            ("../ranks/run", "--json", "absent/x.json"), ("../ranks/run", "--program", "absent"), ("../ranks/run", "--rounds", "0"),
        ):  # fmt: skip
            with self.subTest(program, words=words):
                done = self.python(CPU / program, *words)
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assert_refused(done, words[0])

    def test_what_the_program_says_where_it_fails(self):
        program = self.program(self.folder / "ringspan", 'echo "ranks differ from one rank" >&2; exit 3')
        done = self.python(ROOT / "bench/ranks/run", "--program", program, "--json", "x.json")
        self.assert_refused(done, "--pattern causal", "failed (3)", "ranks differ from one rank")
        self.assertFalse((self.folder / "x.json").exists())

    def test_a_picture_needs_peaks(self):
        report = {"machine": {}, "peaks": {}, "clock": "wall", "cases": []}
        (self.folder / "without.json").write_text(json.dumps(report), encoding="utf-8")
        self.assert_refused(self.python(CPU / "roofline", "without.json", "--output", "x.svg"), "without.json", "no peaks")
        self.assert_refused(self.python(CPU / "roofline", "absent.json", "--output", "x.svg"), "absent.json", "No such file")


class Compared(InFolder):
    """main() of compare, with rows instead of measurements."""

    def setUp(self):
        super().setUp()
        structure = types.ModuleType("structure")
        structure.run_structures = lambda *_: [ROW]
        structure.run_ranks = lambda *_: [ROW]
        path = mock.patch.object(sys, "path", [str(CPU), *sys.path])
        for patch in (path, mock.patch.dict(sys.modules, {"structure": structure})):
            patch.start()
            self.addCleanup(patch.stop)
        loader = importlib.machinery.SourceFileLoader("compare", str(COMPARE))
        self.compare = importlib.util.module_from_spec(importlib.util.spec_from_loader("compare", loader))
        loader.exec_module(self.compare)
        self.compare.run_cases = lambda chosen, *_: [CASE] * bool(chosen)
        self.compare.describe_machine = dict

    def main(self, *words):
        errors = io.StringIO()
        words = ["compare", "--library", str(COMPARE), "--no-peaks", *words]
        with mock.patch.object(sys, "argv", words), contextlib.redirect_stderr(errors):
            return self.compare.main(), errors.getvalue()

    def test_the_floor_is_of_every_ratio(self):
        judged = (("main", "n = 64", "2.5", "1.5"), ("structure", "2 ranks", "1", "0.4"), ("ranks", "2 ranks", "1", "0.4"))
        for group, name, below, above in judged:
            with self.subTest(group):
                code, errors = self.main("--group", group, "--floor", below)
                self.assertEqual(code, 1)
                self.assertIn(f"is below {below}: ", errors)
                self.assertIn(name, errors.splitlines()[-1])
                self.assertEqual(self.main("--group", group, "--floor", above)[0], 0)

    def test_results_are_renamed_into_their_place(self):
        path = self.folder / "x.json"
        path.write_text("earlier", encoding="utf-8")
        os.link(path, self.folder / "earlier.json")
        self.main("--json", str(path))
        self.assertEqual(json.loads(path.read_text(encoding="utf-8"))["cases"], [CASE])
        self.assertEqual((self.folder / "earlier.json").read_text(encoding="utf-8"), "earlier")
        self.assertEqual(self.names(), ["earlier.json", "x.json"])


class Run(InFolder):
    def test_results_go_where_the_caller_stands(self):
        tree = self.tree("bench/cpu/run")
        python = self.program(tree / "build/bench-venv/bin/python", 'pwd; printf "%s\\n" "$@"')
        for name in (".complete", ".pictures"):
            (python.parents[1] / name).touch()
        done = self.call(tree / "bench/cpu/run", "--json", "mine.json")
        called = [str(self.folder), str(tree / "bench/cpu/compare"), "--json", "mine.json"]
        self.assertEqual(done.stdout.split(), called, done.stderr)
        done = self.call(tree / "bench/cpu/run")
        self.assertEqual(done.stdout.split()[2:], ["--json", str(tree / "build/bench/compare.json")])
        self.assertTrue((tree / "build/bench").is_dir())


if __name__ == "__main__":
    unittest.main()
