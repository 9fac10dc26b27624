"""ringspan verify as its users meet it. Standard library only."""

import json
import os
import re
import subprocess
import unittest

PROGRAM = os.environ["RINGSPAN_PROGRAM"]


def verify(*arguments, timeout=500):
    return subprocess.run([PROGRAM, "verify", *arguments], capture_output=True, text=True, timeout=timeout)


class Verify(unittest.TestCase):
    def expect(self, code, *arguments):
        done = verify(*arguments)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done

    def test_one_problem_prints_every_tensor(self):
        done = self.expect(0, "nq=37 h=4 hkv=2 d=8 dv=5 pattern=causal p=3 strategy=ring sinks=1 dlse=1")
        lines = done.stdout.splitlines()
        self.assertEqual(lines[0], "nq=37 h=4 hkv=2 d=8 dv=5 pattern=causal sinks=1 p=3 strategy=ring dlse=1")
        self.assertRegex(lines[1], "agrees with float64 on every element")
        for name in ("o", "lse", "dq", "dk", "dv", "dsinks"):
            self.assertTrue(any(line.split()[0] == name for line in lines[2:]), name)

    def test_words_that_the_shell_split_are_one_problem(self):
        done = self.expect(0, "nq=12", "h=2", "d=4", "p=2")
        self.assertEqual(done.stdout.splitlines()[0], "nq=12 h=2 d=4 p=2")

    def test_several_problems(self):
        done = self.expect(0, "nq=12 h=2 d=4", "nq=13 h=2 d=4", "--json")
        report = json.loads(done.stdout)
        self.assertTrue(report["passed"])
        self.assertEqual([p["problem"] for p in report["problems"]], ["nq=12 h=2 d=4", "nq=13 h=2 d=4"])
        self.assertEqual([t["name"] for t in report["problems"][0]["tensors"]], ["o", "lse", "dq", "dk", "dv"])

    def test_forward_only(self):
        report = json.loads(self.expect(0, "nq=12 h=2 d=4 backward=0", "--json").stdout)
        self.assertEqual([t["name"] for t in report["problems"][0]["tensors"]], ["o", "lse"])

    def test_forked_ranks_with_whole_queries_on_each(self):
        self.expect(0, "nq=40 h=2 d=8 dtype=bfloat16 p=3 replicated_q=1 strategy=ring sinks=1", "--transport", "processes")

    def test_empty_problems(self):
        for line in ("nq=0 h=2 d=4 p=3", "nq=5 nk=0 h=2 d=4 p=2", "nq=0 nk=5 h=2 d=4 p=2", "nq=2 h=1 d=4 p=7"):
            self.expect(0, line)

    def test_right_results_next_to_the_smallest_numbers_pass(self):
        # sinks that leave an o without normal numbers of float16, from which delta is made
        for data in (1, 7, 12):
            self.expect(0, f"nq=36 nk=7 h=7 hkv=1 d=16 dv=80 dtype=float16 sinks=1 softcap=20 scale=-1 keep_o=0 gain=50 data={data}")
        # probabilities below the smallest normal number, which kernels take for 0, with gradients of some thousands
        for ranks in (1, 2):
            self.expect(0, f"b=4 nq=120 nk=198 h=12 hkv=3 d=64 dtype=bfloat16 pattern=window:3,-1 p={ranks} scale=-1 gain=5 data=82001")

    def test_large_problems_are_sampled(self):
        done = self.expect(0, "nq=40000 h=2 d=64 p=2 pattern=window:512,0 strategy=ring", "--json")
        report = json.loads(done.stdout)["problems"][0]
        self.assertTrue(report["sampled"])
        self.assertEqual([t["elements"] for t in report["tensors"][:3]], [64 * 64, 64, 64 * 64])
        self.assertNotIn("from_outputs", report)

    def test_a_sample_has_gradients_of_keys_that_many_queries_see(self):
        for more in ("pattern=causal strategy=ring", "dtype=bfloat16 hkv=1 h=2 softcap=5 alibi=1 sinks=1", "dtype=float16 keep_o=0 dropout=0.2 dlse=1"):
            words = ("h=1 " if " h=" not in more else "") + f"nq=13000 d=32 p=3 {more}"
            report = json.loads(self.expect(0, words, "--json").stdout)["problems"][0]
            self.assertEqual(report["from_outputs"][:2], ["dk", "dv"], words)
            self.assertEqual([t["elements"] for t in report["tensors"][3:5]], [24 * 32] * 2)
            self.assertTrue(all(t["both_nan"] == 0 and t["max_naive_error"] for t in report["tensors"][:5]))
        self.assertIn("\n  dk is compared with the sum over all rows of the o and lse computed\n", self.expect(0, words).stdout)

    def test_a_gain_that_makes_nothing_but_nan_is_refused(self):
        for words, error in (
            ("gain=inf", "gain=inf: expected a finite number"),
            ("dtype=float16 gain=1e6", "gain=1000000: expected one with which float16 can hold every q"),
            ("gain=3e38", "gain=3e+38: expected one with which float32 can hold every q"),
        ):
            self.assertIn(error, self.expect(2, "nq=40 h=1 d=8 " + words).stderr)

    def test_a_sample_has_dsinks_of_all_rows(self):
        for more in ("", " dlse=1 dtype=bfloat16", " dtype=float16 keep_o=0 dropout=0.1 seed=3 replicated_q=1"):
            line = "nq=40000 h=2 d=64 p=2 pattern=window:512,0 strategy=ring sinks=1" + more
            report = json.loads(self.expect(0, line, "--json").stdout)["problems"][0]
            self.assertTrue(report["sampled"])
            self.assertEqual(report["from_outputs"], ["dsinks"])
            dsinks = report["tensors"][-1]
            self.assertEqual((dsinks["name"], dsinks["elements"], dsinks["max_naive_error"]), ("dsinks", 2, None))
        text = self.expect(0, line).stdout
        self.assertRegex(text, r"\n  dsinks +2 +[0-9.e-]+ +-\n")
        self.assertIn("\n  dsinks is compared with the sum over all rows of the o and lse computed\n", text)
        whole = json.loads(self.expect(0, "nq=40 h=2 d=8 sinks=1", "--json").stdout)["problems"][0]
        self.assertNotIn("from_outputs", whole)
        self.assertIsNotNone(whole["tensors"][-1]["max_naive_error"])

    def test_random_problems_can_be_repeated(self):
        first = self.expect(0, "--random", "12", "--seed", "4", "--verbose").stdout
        lines = [line for line in first.splitlines() if " nq=" in line or line.startswith(("b=", "nq="))]
        again = self.expect(0, "--random", "1", "--seed", "4", "--first", "11", "--verbose").stdout
        self.assertEqual(lines[-1], next(line for line in again.splitlines() if " nq=" in line))
        self.expect(0, re.sub(r"^\d+ ", "", lines[-1]))
        self.assertIn("12 of 12 random problems passed", first)
        self.assertIn("never drawn in so few problems: ", first)

    def test_random_over_processes(self):
        report = json.loads(self.expect(0, "--random", "40", "--seed", "2", "--transport", "processes", "--json").stdout)
        self.assertTrue(report["passed"])
        self.assertEqual(sum(report["drawn"]["strategy"].values()), 40)
        self.assertEqual(report["failures"], [])

    def test_an_impossible_budget_is_a_failure_of_the_random_problem_that_meets_it(self):
        done = self.expect(1, "--random", "3", "--seed", "1", "--memory", "1B")
        self.assertIn("FAILED, number ", done.stdout)
        self.assertRegex(done.stdout, r'ringspan verify "[^"]*nq=[^"]*" --memory 1')

    def test_exit_codes(self):
        self.expect(2)
        self.expect(2, "nq=4 h=1 d=8", "--random", "3")
        self.expect(2, "nq=4 h=1")
        self.expect(2, "nq=4 h=3 hkv=2 d=8")
        self.expect(2, "nq=4 h=1 d=8", "--memory", "0")
        self.expect(2, "nq=4 h=1 d=8", "--transport", "pigeons")
        self.expect(3, "nq=4 h=1 d=8 pattern=dilated:2x1@torchscale sinks=1 strategy=ring")
        self.expect(4, "nq=400 h=1 d=8", "--memory", "1B")

    def test_errors_name_the_word(self):
        self.assertIn("unknown word speed=9", self.expect(2, "nq=4 h=1 d=8 speed=9").stderr)
        self.assertTrue(self.expect(2, "nq=4 h=1 d=8 pattern=cusal").stderr.startswith("ringspan: error: pattern: unknown term 'cusal'"))
        self.assertIn("nq=four: expected a whole number", self.expect(2, "nq=four h=1 d=8").stderr)


if __name__ == "__main__":
    unittest.main()
