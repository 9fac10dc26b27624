"""bench/peers without PyTorch, peers or measuring: what is refused first, what stays of results, and
that no rank outlives it."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
import unittest
from unittest import mock

from trees import ROOT, InFolder

PEERS = ROOT / "bench/peers"
RUN = PEERS / "run"
KEPT = {"date": "", "machine": {}, "revision": "", "versions": {"torchscale": "commit 1"}}
CASE = "1-full-4096"


class Refused(InFolder):
    def test_before_anything_is_installed_or_measured(self):
        (self.folder / "bad.json").write_text("{", encoding="utf-8")
        (self.folder / "other.json").write_text("{}", encoding="utf-8")
        for *words, expected in (
            ["--rounds", "0", "at least 1"], ["--limit", "nan", "at least 1"], ["--json", "absent/x.json", "No such file"],
            ["--json", "bad.json", "no JSON"], ["--json", "other.json", "bench/peers/run"], ["--probe", "bogus", "early call"],
            ["--peer-path", "torchscale", "NAME=DIR"], ["--peer-path", "torchscale=absent", "NAME=DIR"],
            ["--peer-path", "bogus=.", "torchscale"], ["--peer", "torchscale", "--peer-path torchscale=DIR"],
            ["--python", "absent", "the step setup"], ["--folder", "bad.json", "cannot be made"],
        ):  # fmt: skip
            with self.subTest(words):
                done = self.call(RUN, "check", "--python", sys.executable, "--folder", "f", *words)
                self.assert_refused(done, words[1], expected)


class Measured(InFolder):
    """run as a module; the groups are made up."""

    def setUp(self):
        super().setUp()
        for patch in (mock.patch.object(sys, "path", list(sys.path)), mock.patch.dict(sys.modules)):
            patch.start()
            self.addCleanup(patch.stop)
        loader = importlib.machinery.SourceFileLoader("run_peers", str(RUN))
        self.run_peers = importlib.util.module_from_spec(importlib.util.spec_from_loader("run_peers", loader))
        loader.exec_module(self.run_peers)
        self.run_peers.start = lambda options, name, case: Made(self, name)
        self.run_peers.machine, self.run_peers.versions = lambda _: {}, lambda _: {"torch": "3"}
        self.python = os.path.abspath(sys.executable)
        self.json = self.folder / "x.json"
        self.fails, self.made = {}, []

    def main(self, *words):
        words = ["run", "--python", self.python, "--json", str(self.json), "--folder", str(self.folder / "f"), *words]
        environment = mock.patch.dict(os.environ, {"RINGSPAN_PEERS_PYTHON": self.python})
        before = signal.getsignal(signal.SIGTERM)
        self.addCleanup(signal.signal, signal.SIGTERM, before)
        with mock.patch.object(sys, "argv", words), environment, contextlib.redirect_stdout(io.StringIO()):
            self.run_peers.main()
        return json.loads(self.json.read_text(encoding="utf-8"))

    def time(self, *words):
        return self.main("time", "--case", CASE, "--peer", "sdpa", "ringspan", "--rounds", "3", *words)["times"]

    def test_a_peer_that_fails_in_its_turns_is_a_result_and_the_others_go_on(self):
        self.fails["sdpa", "time", True] = [None, self.run_peers.Failure("hang", "no answer")]
        times = self.time()
        both = times["sdpa"][CASE]["both"]
        self.assertEqual([both[key] for key in ("failed", "error", "seconds")], ["hang", "no answer", []])
        self.assertGreaterEqual(len(times["sdpa"][CASE]["forward"]["seconds"]), 1)
        self.assertEqual([len(times["ringspan"][CASE][passed]["seconds"]) for passed in ("forward", "both")], [3, 3])
        self.assertFalse(any(group.alive for group in self.made))

    def test_a_peer_that_fails_the_second_time_it_is_started(self):
        failure = self.run_peers.Failure("error", "no")
        self.fails["sdpa", "verify", True] = [failure]
        self.fails["sdpa", "verify", False] = [None, failure]
        times = self.time()
        self.assertEqual([times["sdpa"][CASE][passed]["failed"] for passed in ("forward", "both")], ["error", "error"])
        self.assertEqual(len(times["ringspan"][CASE]["forward"]["seconds"]), 3)
        self.assertFalse(any(group.alive for group in self.made))

    def test_an_interrupt_leaves_the_times_of_an_earlier_run(self):
        earlier = self.time()
        for what in ("verify", "time"):
            self.fails["ringspan", what, True] = [KeyboardInterrupt()]
            with self.subTest(what), self.assertRaises(KeyboardInterrupt):
                self.time()
            self.assertEqual(json.loads(self.json.read_text(encoding="utf-8"))["times"], earlier)

    def test_a_part_that_is_measured_again_keeps_the_rest(self):
        self.json.write_text(json.dumps({**KEPT, "checks": {"torchscale": {"case": 1}}}), encoding="utf-8")
        os.link(self.json, self.folder / "earlier.json")
        self.run_peers.check_case = lambda *_: {}
        results = self.main("check")  # of all peers, without --peer-path
        self.assertEqual(results["versions"], {"torchscale": "commit 1", "torch": "3"})
        self.assertEqual(results["checks"]["torchscale"], {"case": 1})
        earlier = json.loads((self.folder / "earlier.json").read_text(encoding="utf-8"))
        self.assertNotIn("torch", earlier["versions"])  # renamed into its place

    def test_a_hold_that_fails_is_no_quiet_machine(self):
        with self.assertRaisesRegex(SystemExit, "--hold exit 3"):
            self.time("--hold", "exit 3")
        self.assertEqual(len(self.time("--hold", "echo quiet; cat")["sdpa"][CASE]["forward"]["seconds"]), 3)


class Made:
    """A group of one rank, which fails where `test` says so."""

    ranks = 1

    def __init__(self, test, name):
        self.test, self.name, self.alive = test, name, True
        test.made.append(self)

    def ask(self, limit, do, backward):
        next_ones = self.test.fails.get((self.name, do, backward))
        failure = next_ones.pop(0) if next_ones else None
        if failure:
            self.alive = getattr(failure, "kind", "") != "hang"
            raise failure
        return [{"seconds": 1.0, "cpu": 2.0, "errors": {"o": 0.0}, "largest": {"o": 1.0}}]

    def end(self):
        self.alive = False


class Report(InFolder):
    def setUp(self):
        super().setUp()
        self.results = max((ROOT / "bench/results").glob("*-peers.json")).relative_to(ROOT)
        programs = [f"bench/peers/{name}" for name in ("report", "tables.py", "cases.py", "peers.py")]
        self.report = self.tree(*programs, "bench/cpu/reports.py", "docs/comparison.md", self.results) / "bench/peers/report"
        self.page = self.folder / "tree/docs/comparison.md"

    def test_the_page_is_renamed_into_its_place(self):
        whole = self.page.read_text(encoding="utf-8")
        self.page.write_text(whole.replace("| torch SDPA |", "| another |"), encoding="utf-8")
        os.link(self.page, self.folder / "earlier.md")
        done = self.call(self.report)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.page.read_text(encoding="utf-8"), whole)
        self.assertIn("| another |", (self.folder / "earlier.md").read_text(encoding="utf-8"))

    def test_files_that_are_of_something_else(self):
        (self.folder / "part.json").write_text(json.dumps(KEPT), encoding="utf-8")
        for name, *texts in (("absent.json", "No such file"), ("part.json", "times", "faults", "bench/peers/run")):
            with self.subTest(name):
                self.assert_refused(self.call(self.report, name), name, *texts)


class Python(InFolder):
    def test_another_python_is_started_once(self):
        # It has another name for itself, and ends where it is asked what it has.
        given_up = "[[ $1 != -c ]] && (($(wc -l <called) < 5)) || exit 9"
        self.program(self.folder / "python", f'echo "$1" >>called; {given_up}; exec {sys.executable} "$@"')
        self.call(RUN, "check", "--python", "python", "--folder", "f")
        self.assertEqual((self.folder / "called").read_text(encoding="utf-8").splitlines(), [str(RUN), "-c"])


WORKER = """
import os, time
def main(setting, connection, log):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(60)  # and never answers
"""
PARENT = """
import pathlib, signal, sys
sys.path[:0] = ["mine", PEERS, CPU]
from cases import Case
from group import Group
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
if __name__ == "__main__":
    Group("sdpa", Case("case", "full", 8), pathlib.Path.cwd())
"""


class Ended(InFolder):
    def test_a_rank_does_not_outlive_a_run_that_is_told_to_end(self):
        (self.folder / "mine").mkdir()
        (self.folder / "mine/worker.py").write_text(WORKER, encoding="utf-8")
        paths = f"PEERS, CPU = {str(PEERS)!r}, {str(ROOT / 'bench/cpu')!r}\n"
        (self.folder / "parent.py").write_text(paths + PARENT, encoding="utf-8")
        command = [sys.executable, "-B", "parent.py"]
        with subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True) as parent:
            rank = int(parent.stdout.readline())
            try:
                parent.terminate()
                self.assertEqual(parent.wait(20), 1)
                self.assertFalse(alive(rank))
            finally:
                parent.kill()


def alive(process):
    """Soon, when it was told to end: whoever started it may have yet to ask for how it ended."""
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.01)
    return True


if __name__ == "__main__":
    unittest.main()
