"""What `ringspan run` leaves behind when it is stopped, killed or cannot write: no output and no temporary file."""

import json
import os
import resource
import signal
import struct
import subprocess
import tempfile
import time
import unittest

import safetensors_file
from program import ARGUMENTS, COMMUNICATION, INPUT_OUTPUT, INTERRUPTED, PROGRAM, ProgramTest

for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)  # what a shell starts in the background ignores SIGINT, and so would the program
SLOW_TO_VERIFY = ("--pattern", "window:1023,0")  # takes float64 many seconds, and the ranks less than one


def catches_interrupts(process):
    """Whether the program has come so far, however slow the machine."""
    with open(f"/proc/{process.pid}/status") as status:
        caught = next(line.split()[1] for line in status if line.startswith("SigCgt"))
    return int(caught, 16) >> (signal.SIGINT - 1) & 1


class Faults(ProgramTest):
    def setUp(self):
        super().setUp()
        # With the reference kernels this takes minutes: it is always stopped while it computes.
        self.source = self.write("in.safetensors", {name: safetensors_file.tiled((1, 8192, 8, 64), 1) for name in "qkv"})
        self.results = os.path.join(self.folder, "results")
        os.mkdir(self.results)
        self.output = os.path.join(self.results, "out.safetensors")

    def start(self, *arguments, **options):
        process = subprocess.Popen(
            [PROGRAM, "run", "--input", self.source, "--output", self.output, "--kernel", "reference", "--ranks", "3",
             "--strategy", "ring", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
        )  # fmt: skip
        self.addCleanup(process.kill)
        return process

    def children(self, process):
        with open(f"/proc/{process.pid}/task/{process.pid}/children", encoding="ascii") as file:
            return [int(pid) for pid in file.read().split()]

    def wait_until(self, condition, what):
        end = time.monotonic() + 300
        while time.monotonic() < end:
            if condition():
                return
            time.sleep(0.02)
        self.fail(f"never saw {what}")

    def wait_for_work(self, process, processes):
        self.wait_until(lambda: any(name.endswith(".partial") for name in os.listdir(self.results)), "the temporary file")
        if processes:
            self.wait_until(lambda: len(self.children(process)) == 3, "three ranks")
        time.sleep(0.5)

    def assert_nothing_left(self, process, code, message):
        out, err = process.communicate(timeout=300)
        self.assertEqual(process.returncode, code, err)
        self.assertIn(message, err)
        self.assertEqual(out, "")
        self.assertEqual(os.listdir(self.results), [])

    def test_interrupt_of_threads(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGXCPU):
            process = self.start()
            self.wait_for_work(process, False)
            process.send_signal(number)
            self.assert_nothing_left(process, INTERRUPTED, "ringspan: error: interrupted")

    def test_interrupt_of_processes_reaches_all_of_them(self):
        process = self.start("--transport", "processes")
        self.wait_for_work(process, True)
        ranks = self.children(process)
        process.send_signal(signal.SIGTERM)
        self.assert_nothing_left(process, INTERRUPTED, "interrupted")
        for rank in ranks:
            self.assertFalse(os.path.exists(f"/proc/{rank}"), rank)

    def test_control_c_reaches_all_processes_at_once(self):
        process = self.start("--transport", "processes", start_new_session=True)
        self.wait_for_work(process, True)
        os.killpg(process.pid, signal.SIGINT)
        self.assert_nothing_left(process, INTERRUPTED, "ringspan: error: interrupted")

    def verifying(self, *options):
        """A run that has computed and verifies, and the terminal that it writes to."""
        terminal, stderr = os.openpty()
        process = subprocess.Popen(
            [PROGRAM, "run", "--input", self.source, "--output", self.output, "--verify", *SLOW_TO_VERIFY, *options],
            stdout=subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
        os.close(stderr)
        self.addCleanup(process.kill)
        shown = b""
        while b"verifying" not in shown:
            shown += os.read(terminal, 1000)
        return process, terminal

    def test_interrupt_of_the_verification(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            process, terminal = self.verifying("--ranks", "2")
            self.assertEqual(len(os.listdir(self.results)), 1)
            process.send_signal(number)
            self.assertEqual(process.communicate(timeout=30)[0], b"")
            self.assertEqual(process.returncode, INTERRUPTED)
            self.assertIn(b"ringspan: error: interrupted", os.read(terminal, 1000))
            os.close(terminal)
            self.assertEqual(os.listdir(self.results), [])
        bench = subprocess.Popen([PROGRAM, "bench", "--tokens", "8192", "--forward-only", *SLOW_TO_VERIFY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(bench.kill)
        while not catches_interrupts(bench):
            time.sleep(0.01)
        time.sleep(2)
        bench.send_signal(signal.SIGINT)
        self.assertEqual(bench.communicate(timeout=30), ("", "ringspan: error: interrupted\n"))
        self.assertEqual(bench.returncode, INTERRUPTED)

    def assert_interrupted(self, command, timeout):
        """A command that takes minutes ends soon after Ctrl-C, and says nothing else."""
        process = subprocess.Popen([PROGRAM, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.kill)
        while not catches_interrupts(process):
            time.sleep(0.01)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=timeout)
        self.assertEqual((process.returncode, out, err), (INTERRUPTED, "", "ringspan: error: interrupted\n"), command)
        self.assertEqual(os.listdir(self.results), [])

    def test_interrupt_while_many_ranks_are_planned(self):
        many = ["--ranks", "1500", "--sharding", "zigzag", "--pattern", "causal"]  # takes minutes
        for command in (
            ["run", "--input", self.source, "--output", self.output, *many],
            ["run", "--input", self.source, "--output", self.output, "--compare", "1500", "--pattern", "window:1,0"],
            ["run", "--input", self.source, "--output", self.output, *many, "--sequential", "--strategy", "exchange"],
            ["bench", "--tokens", "8192", "--heads", "1", *many],
            ["plan", "--tokens", "8192", "--heads", "1", *many, "--rank", "all"],
            ["verify", "nq=8192 h=1 d=16 p=1500 pattern=causal shard_q=zigzag shard_k=zigzag strategy=ring"],
        ):
            self.assert_interrupted(command, timeout=60)

    def test_interrupt_while_numbers_are_drawn(self):
        for command in (["verify", "nq=2000000 h=8 d=64 dtype=bf16 pattern=window:1,0"],
                        ["bench", "--tokens", "2000000", "--dtype", "bf16", "--pattern", "window:1,0"]):  # fmt: skip
            self.assert_interrupted(command, timeout=30)

    def test_a_second_interrupt_ends_at_once_and_cleans_up(self):
        process = self.start()
        self.wait_for_work(process, False)
        os.kill(process.pid, signal.SIGSTOP)  # so that both arrive before it can react to the first
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        process.communicate(timeout=300)
        self.assertIn(process.returncode, (-signal.SIGTERM, -signal.SIGINT, INTERRUPTED))
        self.assertEqual(os.listdir(self.results), [])

    def test_a_killed_rank_is_named(self):
        process = self.start("--transport", "processes")
        self.wait_for_work(process, True)
        os.kill(self.children(process)[1], signal.SIGKILL)
        self.assert_nothing_left(process, COMMUNICATION, "rank 1")

    def test_an_input_that_becomes_shorter(self):
        few, many = [1, 8, 1, 64], [1, 1 << 20, 1, 64]  # so long to read that it is still read when it is cut off
        header = {"q": few, "k": many, "v": many}
        offset, entries = 0, {}
        for name, shape in header.items():
            bytes_ = 4 * shape[1] * 64
            entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + bytes_]}
            offset += bytes_
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        for more in ([], ["--transport", "processes"], ["--sequential", "--strategy", "exchange"]):
            with open(self.source, "wb") as file:
                file.write(struct.pack("<Q", len(text)) + text)
                file.truncate(8 + len(text) + offset)
            process = subprocess.Popen(
                [PROGRAM, "run", "--input", self.source, "--output", self.output, "--ranks", "3", *more],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
            self.addCleanup(process.kill)
            while process.poll() is None and not os.listdir(self.results):
                pass
            process.send_signal(signal.SIGSTOP)
            os.truncate(self.source, 5000)
            process.send_signal(signal.SIGCONT)
            self.assert_nothing_left(process, INPUT_OUTPUT, f"ringspan: error: {self.source}: cannot be read any more: it became shorter")

    def test_an_input_that_becomes_shorter_while_it_is_verified(self):
        process, terminal = self.verifying()
        os.truncate(self.source, 5000)
        process.communicate(timeout=300)
        self.assertEqual(process.returncode, INPUT_OUTPUT)
        self.assertIn(b"cannot be read any more", os.read(terminal, 1000))
        os.close(terminal)
        self.assertEqual(os.listdir(self.results), [])

    def test_an_earlier_output_survives(self):
        with open(self.output, "w", encoding="ascii") as file:
            file.write("precious")
        process = self.start()
        self.wait_for_work(process, False)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=300)
        self.assertEqual(os.listdir(self.results), ["out.safetensors"])
        with open(self.output, encoding="ascii") as file:
            self.assertEqual(file.read(), "precious")

    def test_a_full_disk(self):
        def limit():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        process = self.start(preexec_fn=limit)
        self.assert_nothing_left(process, INPUT_OUTPUT, "File too large")

    def test_the_output_has_its_room_on_the_disk_before_the_work(self):
        def has_room(path):
            status = os.stat(path)
            return 512 * status.st_blocks >= status.st_size > 0

        with tempfile.NamedTemporaryFile(dir=self.results) as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 20)
            if not has_room(file.name):
                self.skipTest("this file system books no room")
        process = self.start()
        self.wait_for_work(process, False)
        self.assertTrue(has_room(os.path.join(self.results, os.listdir(self.results)[0])))
        process.send_signal(signal.SIGTERM)
        self.assert_nothing_left(process, INTERRUPTED, "interrupted")

    def test_what_cannot_be_compared_is_known_before_the_work(self):
        begin = time.monotonic()
        self.assert_nothing_left(self.start("--compare", "2000000"), ARGUMENTS, "ranks (2000000) must be at most 1048576")
        self.assertLess(time.monotonic() - begin, 20)  # seconds, where the work takes minutes

    def test_what_a_killed_process_of_the_same_number_left(self):
        tuned = os.path.join(self.results, "tune.json")
        left = [f"{self.output}.%d-0.partial", f"{tuned}.%d-0.tmp", f"{tuned}.%d-2.tmp"]  # in containers numbers come again

        def leave():
            for name in left:
                with open(name % os.getpid(), "w", encoding="ascii") as file:
                    file.write("of another")

        run = ["run", "--input", self.source, "--output", self.output, "--pattern", "window:1,0"]
        tune = ["tune", "--dtype", "float32", "--head-dim", 16, "--quick", "--tokens", 64]
        for arguments, made in (run, self.output), (tune, tuned):
            self.run_program(*arguments, preexec_fn=leave, env={**os.environ, "RINGSPAN_TUNE_FILE": tuned if arguments is tune else ""})
            with open(made, "rb") as file:
                self.assertNotIn(b"of another", file.read())

    def test_a_folder_that_does_not_exist(self):
        self.output = os.path.join(self.results, "missing", "out.safetensors")
        self.assert_nothing_left(self.start(), INPUT_OUTPUT, "No such file or directory")

    def test_standard_output_that_cannot_be_written(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            result = subprocess.run([PROGRAM, "capabilities"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        self.assertEqual(result.returncode, INPUT_OUTPUT)
        self.assertIn("standard output: ", result.stderr)

    def test_standard_error_that_cannot_be_written(self):
        with open("/dev/full", "w", encoding="ascii") as full:
            for arguments, code in (["rnu"], ARGUMENTS), (["plan", "--tokens", "nonsense"], ARGUMENTS), ([], ARGUMENTS), (["inspect", "no file"], INPUT_OUTPUT):
                self.assertEqual(subprocess.run([PROGRAM, *arguments], stderr=full, check=False).returncode, code)
                closed = subprocess.run([PROGRAM, *arguments], preexec_fn=lambda: os.close(2), check=False)
                self.assertEqual(closed.returncode, code)


if __name__ == "__main__":
    unittest.main()
