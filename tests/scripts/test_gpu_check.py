"""scripts/gpu-check with stand-ins for what it builds: what is kept, what is ended, what is refused."""

import json
import os
import pathlib
import signal
import subprocess
import unittest

from trees import InFolder

# The first run is measured; the second one begins a process and waits for it.
DEVICE_BENCH = """
if mkdir "$0.called" 2>/dev/null; then
  echo '{"figure": 1}'
else
  sleep 600 &
  echo $! >"$0.begun.new" && mv "$0.begun.new" "$0.begun"
  wait
fi"""


def runs(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class GpuCheck(InFolder):
    def setUp(self):
        super().setUp()
        self.check = self.tree("scripts/gpu-check", "python/ringspan/__init__.py") / "scripts/gpu-check"
        self.program(self.folder / "path/cmake", "")
        self.build = self.folder / "build"
        self.begun = self.build / "bin/device_bench.begun"
        self.environment = {**os.environ, "PATH": f"{self.folder / 'path'}:{os.environ['PATH']}"}

    def json(self, part):
        return json.loads((self.build / f"gpu-check-{part}.json").read_text(encoding="utf-8"))

    def test_a_signal_ends_the_step_and_what_was_measured_is_written(self):
        for number, deaf in ((signal.SIGINT, "trap '' TERM"), (signal.SIGTERM, "")):
            with self.subTest(number.name):
                self.program(self.build / "bin/device_bench", deaf + DEVICE_BENCH)
                command = [self.check, "long", "--device", "cuda-emulated", "--build", self.build]
                with subprocess.Popen(command, env=self.environment, stdout=subprocess.PIPE, text=True) as child:
                    while "figure" not in child.stdout.readline():
                        pass
                    while not self.begun.exists():
                        self.assertIsNone(child.poll())
                    child.send_signal(number)
                    child.communicate(timeout=60)
                self.assertEqual(child.returncode, 128 + number)
                written = self.json("long")
                self.assertEqual(written["figures"], [{"figure": 1}])
                self.assertIn(f"interrupted by {number.name}", written["failed"])
                self.assertFalse(written["passed"])
                self.assertFalse(runs(self.begun.read_text(encoding="utf-8").strip()))
                self.begun.unlink()
                (self.build / "bin/device_bench.called").rmdir()

    def test_figures_of_an_earlier_run_are_not_those_of_this_one(self):
        self.build.mkdir()
        (self.build / "cuda-compare.json").write_text('{"figure": "earlier"}', encoding="utf-8")
        done = self.call(self.check, "torch", "--device", "cuda-emulated", "--build", "build", env=self.environment)
        self.assertEqual(done.returncode, 1)
        self.assertIn("calls and graphs beside torch's", self.json("torch")["failed"])
        self.assertNotIn("compare", self.json("torch"))

    def test_sanitize_writes_where_the_help_says(self):
        self.call(self.check, "sanitize", "--device", "cuda-emulated", "--build", "build", env=self.environment)
        self.assertEqual(self.json("sanitize")["part"], "sanitize")

    def test_words_that_are_refused(self):
        for words in (["--gpus", "0"], ["--cases", "-4"], ["--device", "foo"], ["--out", self.folder]):
            with self.subTest(words):
                self.assert_refused(self.call(self.check, "long", *words, env=self.environment), *words)
        self.assertEqual(self.names(), ["path", "tree"])


if __name__ == "__main__":
    unittest.main()
