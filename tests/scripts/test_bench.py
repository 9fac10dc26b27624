"""scripts/bench runs the programs of Google Benchmark, all of them, and then bench/*/run."""

import os
import subprocess
import unittest

from trees import ROOT, InFolder

BIN = ROOT / "build/release/bin"
GOOGLE = """
for word; do
  case $word in --benchmark_out=*) echo '{}' >"${word#*=}" ;; --benchmark_*) ;; *) exit 2 ;; esac
done
echo "${0##*/}" >>called"""


class Bench(InFolder):
    def setUp(self):
        super().setUp()
        tree = self.tree("scripts/bench", "src/kernels/attend_bench.cc", "src/plan/plan_bench.cc")
        (tree / "src/plan/another_bench.cc").touch()
        self.bench = tree / "scripts/bench"
        self.program(tree / "build/release/bin/device_bench", 'echo "usage: device_bench DEVICE" >&2; exit 2')
        self.program(tree / "build/release/bin/kernels_bench", GOOGLE)
        self.plan = self.program(tree / "build/release/bin/plan_bench", GOOGLE)
        self.program(tree / "bench/cpu/run", "echo cpu >>called")
        cmake = self.program(self.folder / "path/cmake", 'echo "$*" >built')
        self.environment = {**os.environ, "PATH": f"{cmake.parent}:{os.environ['PATH']}"}

    def test_programs_of_google_benchmark_and_then_whole_runs(self):
        done = self.call(self.bench, env=self.environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("--target benches", (self.folder / "tree/built").read_text(encoding="utf-8"))
        called = (self.folder / "tree/called").read_text(encoding="utf-8").split()
        self.assertEqual(called, ["kernels_bench", "plan_bench", "cpu"])
        self.assertEqual(self.names("tree/build/bench"), ["kernels_bench.json", "plan_bench.json"])

    def test_one_that_fails_leaves_the_results_of_an_earlier_run(self):
        self.program(self.plan, 'touch "build/bench/plan_bench.json.new"; exit 1')
        earlier = self.folder / "tree/build/bench/plan_bench.json"
        earlier.parent.mkdir()
        earlier.write_text("earlier", encoding="utf-8")
        self.assertEqual(self.call(self.bench, env=self.environment).returncode, 1)
        self.assertEqual(earlier.read_text(encoding="utf-8"), "earlier")

    def test_unknown_words(self):
        for words in (["--bogus"], ["--list", "more"], [""]):
            with self.subTest(words):
                self.assert_refused(self.call(self.bench, *words, env=self.environment), "usage: scripts/bench [--list]")
        self.assertFalse((self.folder / "tree/built").exists())


class Programs(unittest.TestCase):
    def test_those_that_are_built_are_of_google_benchmark_and_no_other_is(self):
        listed = subprocess.run([ROOT / "scripts/bench", "--list"], capture_output=True, text=True, check=True).stdout.split()
        built = [path for path in BIN.glob("*_bench") if path.is_file()]
        if not built:
            self.skipTest(f"{BIN} has no benchmarks")
        for program in built:
            done = subprocess.run([program, "--benchmark_list_tests"], capture_output=True, timeout=60, check=False)
            with self.subTest(program.name):
                self.assertEqual(str(program.relative_to(ROOT)) in listed, done.returncode == 0)


if __name__ == "__main__":
    unittest.main()
