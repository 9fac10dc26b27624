"""`ringspan run`: the same numbers whatever the strategy, sharding, transport and layout; what is written and what is told."""

import fcntl
import json
import math
import os
import pty
import struct
import subprocess
import termios
import unittest

import safetensors_file
from program import FAILED, MEMORY, PROGRAM, ProgramTest, call

STRATEGIES = ["local", "all-gather", "exchange", "ring", "pass-q", "ulysses"]
TOLERANCE = {"F32": 2e-5, "BF16": 3e-2, "F16": 4e-3}  # of o and gradients of order one
GRADIENTS = ["dq", "dk", "dv"]
COLUMNS = 16  # of a terminal: a line of progress takes more


class Run(ProgramTest):
    def results(self, source, *arguments, output="out.safetensors"):
        self.run_program("run", "--input", source, "--output", self.path(output), "--verify", *arguments)
        return safetensors_file.read(self.path(output))

    def assert_same_results(self, actual, expected, what):
        self.assertEqual(sorted(actual), sorted(expected), what)
        for name, (dtype, shape, payload) in expected.items():
            self.assertEqual(actual[name][:2], (dtype, shape), f"{what}: {name}")
            tolerance = TOLERANCE[expected["o"][0]] if name != "lse" else 2e-5
            values = safetensors_file.decode(payload, dtype)
            self.assert_close(safetensors_file.decode(actual[name][2], dtype), values, tolerance, f"{what}: {name}")

    def test_every_strategy_gives_the_results_of_one_rank(self):
        source = self.write("in.safetensors", safetensors_file.qkv(61, 4, 8, kv_heads=2, head_dim_v=12))
        for pattern in ("full", "causal", "window:9,0", "dilated:16x1,32x2@longnet & causal"):
            one, _ = self.results(source, "--pattern", pattern, "--grad", "random:7")
            self.assertEqual(sorted(one), ["dk", "dq", "dv", "lse", "o"])
            for strategy in STRATEGIES:
                arguments = ["--pattern", pattern, "--grad", "random:7", "--ranks", 4, "--strategy", strategy]
                self.assert_same_results(self.results(source, *arguments)[0], one, f"{pattern} {strategy}")

    def test_every_sharding_and_bucket_gives_the_results_of_one_rank(self):
        source = self.write("in.safetensors", safetensors_file.qkv(53, 2, 8))
        one, _ = self.results(source, "--pattern", "causal", "--grad", "ones")
        shardings = ["contiguous", "zigzag", "striped", "block_striped:5", "explicit:0-9;10-10;11-52"]
        for sharding in shardings:
            for bucket in ("auto", "none", "3"):
                arguments = ["--pattern", "causal", "--grad", "ones", "--ranks", 3, "--strategy", "ring", "--bucket", bucket]
                found, _ = self.results(source, *arguments, "--sharding", sharding)
                self.assert_same_results(found, one, f"{sharding} bucket {bucket}")
        found, _ = self.results(
            source, "--pattern", "causal", "--grad", "ones", "--ranks", 3, "--sharding", "zigzag", "--sharding-k", "striped"
        )
        self.assert_same_results(found, one, "zigzag queries, striped keys")

    def test_replicated_queries(self):
        source = self.write("in.safetensors", safetensors_file.qkv(40, 2, 8))
        one, _ = self.results(source, "--pattern", "causal", "--grad", "random:1")
        found, _ = self.results(
            source, "--pattern", "causal", "--grad", "random:1", "--ranks", 4, "--strategy", "ring", "--replicated-q"
        )
        self.assert_same_results(found, one, "replicated q")

    def test_sixteen_bits(self):
        for dtype in ("BF16", "F16"):
            source = self.write("in.safetensors", safetensors_file.qkv(45, 4, 16, dtype=dtype))
            one, _ = self.results(source, "--pattern", "causal", "--grad", "random:2")
            self.assertEqual({name: tensor[0] for name, tensor in one.items()}, dict.fromkeys(["o", *GRADIENTS], dtype) | {"lse": "F32"})
            for strategy in ("ring", "ulysses", "pass-q"):
                found, _ = self.results(source, "--pattern", "causal", "--grad", "random:2", "--ranks", 3, "--strategy", strategy)
                self.assert_same_results(found, one, f"{dtype} {strategy}")

    def test_processes_and_threads_give_the_same_bits(self):
        source = self.write("in.safetensors", safetensors_file.qkv(50, 2, 8))
        arguments = ["--pattern", "causal", "--grad", "random:3", "--ranks", 4, "--strategy", "ring", "--threads", 1]
        threads, _ = self.results(source, *arguments, "--transport", "threads")
        processes, _ = self.results(source, *arguments, "--transport", "processes")
        self.assertEqual(threads, processes)

    def test_documents_sinks_slopes_softcap_and_dropout(self):
        tensors = safetensors_file.qkv(48, 4, 8)
        tensors["cu_seqlens"] = ("I32", [4], safetensors_file.encode([0, 11, 12, 48], "I32"))
        tensors["sinks"] = safetensors_file.normal([4], 9)
        tensors["alibi_slopes"] = ("F32", [4], safetensors_file.encode([0.5, 0.25, 0.125, 0.0625]))
        source = self.write("in.safetensors", tensors)
        arguments = ["--pattern", "causal & documents", "--grad", "random:4", "--softcap", 20, "--dropout", 0.2, "--seed", 5]
        one, metadata = self.results(source, *arguments)
        self.assertEqual(one["dsinks"][:2], ("F32", [4]))
        for word in ("alibi=1", "sinks=1", "softcap=20", "dropout=0.2", "seed=5", "cu_q=0,11,12,48"):
            self.assertIn(word, metadata["problem"])
        for strategy in ("exchange", "ring", "ulysses"):
            found, _ = self.results(source, *arguments, "--ranks", 3, "--strategy", strategy)
            self.assert_same_results(found, one, strategy)

    def test_documents_of_queries_and_keys_differ(self):
        tensors = safetensors_file.qkv(30, 2, 8, tokens_k=41)
        tensors["cu_seqlens_q"] = ("I32", [3], safetensors_file.encode([0, 10, 30], "I32"))
        tensors["cu_seqlens_k"] = ("I32", [3], safetensors_file.encode([0, 30, 41], "I32"))
        source = self.write("in.safetensors", tensors)
        one, _ = self.results(source, "--pattern", "causal & documents")
        found, _ = self.results(source, "--pattern", "causal & documents", "--ranks", 3, "--strategy", "ring")
        self.assert_same_results(found, one, "documents")

    def test_lengths_of_batch_items(self):
        source = self.write("in.safetensors", safetensors_file.qkv(20, 2, 8, batch=3))
        one, _ = self.results(source, "--pattern", "causal", "--lengths", "20,0,7", "--grad", "ones")
        lse = safetensors_file.decode(one["lse"][2])
        self.assertEqual(sum(1 for value in lse if value == float("-inf")), 2 * (20 + 13))
        found, _ = self.results(source, "--pattern", "causal", "--lengths", "20,0,7", "--grad", "ones", "--ranks", 2)
        self.assert_same_results(found, one, "lengths")

    def test_layout_bhsd_is_the_same_transposed(self):
        tokens, heads, dim = 19, 3, 4
        bshd = safetensors_file.qkv(tokens, heads, dim, dtype="F32")

        def transposed(tensor, rows, columns):
            dtype, shape, payload = tensor
            values = safetensors_file.decode(payload, dtype)
            out = [
                values[(row * columns + column) * dim + c] for column in range(columns) for row in range(rows) for c in range(dim)
            ]
            return dtype, [shape[0], shape[2], shape[1], shape[3]], safetensors_file.encode(out, dtype)

        bhsd = {name: transposed(tensor, tokens, heads) for name, tensor in bshd.items()}
        arguments = ["--pattern", "causal", "--grad", "random:11", "--ranks", 2, "--strategy", "ring"]
        expected, _ = self.results(self.write("bshd.safetensors", bshd), *arguments)
        asked, _ = self.results(self.write("bhsd.safetensors", bhsd), *arguments, "--layout", "bhsd")
        said = self.write("said.safetensors", bhsd, {"layout": "batch,heads,tokens,head_dim"})
        found, metadata = self.results(said, *arguments)
        self.assertEqual(metadata["layout"], "batch,heads,tokens,head_dim")
        self.assertEqual(found, asked)
        for name in ("o", *GRADIENTS):
            self.assertEqual(transposed(expected[name], tokens, heads), found[name], name)
        self.assertEqual(expected["lse"], found["lse"])

    def test_gradient_of_a_file_with_dlse(self):
        source = self.write("in.safetensors", safetensors_file.qkv(33, 2, 8))
        gradient = {"d_out": safetensors_file.normal((1, 33, 2, 8), 5), "dlse": safetensors_file.normal((1, 2, 33), 6)}
        arguments = ["--pattern", "causal", "--grad", self.write("grad.safetensors", gradient)]
        one, _ = self.results(source, *arguments)
        found, _ = self.results(source, *arguments, "--ranks", 3, "--strategy", "ring")
        self.assert_same_results(found, one, "file")
        del gradient["dlse"]
        without, _ = self.results(source, "--pattern", "causal", "--grad", self.write("plain.safetensors", gradient))
        self.assertNotEqual(without["dq"], one["dq"])
        self.assertEqual(without["o"], one["o"])
        report = self.run_json("run", "--input", source, "--output", self.path("out.safetensors"), *arguments, "--ranks", 3)
        for rank, rows in zip(report["by_rank"], (11, 11, 11)):
            memory = dict(rank["memory_bytes"])
            self.assertEqual((memory["dlse"], memory["lse"]), (rows * 2 * 4, rows * 2 * 4))
            self.assertEqual(memory.pop("all"), sum(memory.values()))

    def test_a_random_gradient_does_not_depend_on_the_ranks(self):
        source = self.write("in.safetensors", safetensors_file.qkv(16, 2, 8))
        one, _ = self.results(source, "--grad", "random:1")
        two, _ = self.results(source, "--grad", "random:1", "--ranks", 2, "--sharding", "striped", "--strategy", "exchange")
        self.assert_same_results(two, one, "striped")
        other, _ = self.results(source, "--grad", "random:2")
        self.assertNotEqual(other["dq"], one["dq"])

    def test_empty_and_tiny_inputs(self):
        for tokens, tokens_k in ((0, 0), (1, 1), (3, 0), (2, 5)):
            source = self.write("in.safetensors", safetensors_file.qkv(tokens, 2, 4, tokens_k=tokens_k))
            found, _ = self.results(source, "--ranks", 4, "--strategy", "ring", "--grad", "ones")
            self.assertEqual(found["o"][1], [1, tokens, 2, 4])
            if tokens_k == 0:
                self.assertEqual(safetensors_file.decode(found["o"][2]), [0.0] * (tokens * 8))
                self.assertEqual(safetensors_file.decode(found["lse"][2]), [float("-inf")] * (tokens * 2))

    def test_a_misaligned_file_is_read_right(self):
        tensors = safetensors_file.qkv(12, 2, 4)
        expected, _ = self.results(self.write("in.safetensors", tensors), "--grad", "ones")
        shifted = {"pad": ("U8", [1], b"x"), **tensors}
        found, _ = self.results(self.write("shifted.safetensors", shifted), "--grad", "ones")
        self.assertEqual(found, expected)

    def test_results_that_fail_verification_are_not_written(self):
        tensors = safetensors_file.qkv(6, 1, 4)
        for name in "qk":  # a score that float32 cannot hold, but float64 can
            values = safetensors_file.decode(tensors[name][2])
            tensors[name] = ("F32", [1, 6, 1, 4], safetensors_file.encode([1e30, *values[1:]]))
        source = self.write("in.safetensors", tensors)
        arguments = ["run", "--input", source, "--output", self.path("out.safetensors")]
        report = self.run_json(*arguments, "--verify", code=FAILED)
        self.assertIsNone(report["output"])
        self.assertIn("no output was written", report["notes"][-1])
        failed = {tensor["name"]: tensor["failures"] for tensor in report["verification"]["tensors"]}
        self.assertEqual(failed, {"o": 4, "lse": 1})
        self.assertIn("FAILED", self.run_program(*arguments, "--verify", code=FAILED).stdout)
        self.assertEqual(os.listdir(self.folder), ["in.safetensors"])
        self.run_program(*arguments)  # unasked, what was computed is written
        self.assertIn("out.safetensors", os.listdir(self.folder))

    def test_nan_agrees_with_nan(self):
        tensors = safetensors_file.qkv(6, 1, 4)
        values = safetensors_file.decode(tensors["v"][2])
        tensors["v"] = ("F32", [1, 6, 1, 4], safetensors_file.encode([float("nan"), *values[1:]]))
        out, _ = self.results(self.write("in.safetensors", tensors))
        nans = [math.isnan(value) for value in safetensors_file.decode(out["o"][2])]
        self.assertEqual(nans, [True, False, False, False] * 6)
        arguments = ["run", "--input", self.path("in.safetensors"), "--output", self.path("again"), "--verify"]
        self.assertEqual([tensor["both_nan"] for tensor in self.run_json(*arguments)["verification"]["tensors"]], [6, 0])
        text = self.run_program(*arguments).stdout
        self.assertIn("agrees with float64", text)
        self.assertRegex(text, r"\n  o +24 .* 6 NaN in both\n")
        tensors["q"] = ("F32", [1, 6, 1, 4], safetensors_file.encode([math.nan] * 24))
        self.write("in.safetensors", tensors)
        text = self.run_program(*arguments).stdout
        self.assertIn("SAYS NOTHING: o is NaN, as float64 has it, on every element", text)
        self.assertNotIn("agrees", text)

    def test_infinite_sinks_take_all_weight(self):
        infinity = math.inf
        sinks = ("F32", [3], safetensors_file.encode([infinity, 0.5, -infinity]))
        source = self.write("in.safetensors", {**safetensors_file.qkv(9, 3, 4), "sinks": sinks})
        for more in ([], ["--ranks", 3, "--kernel", "reference"]):
            for gradient in ([], ["--grad", "ones"]):
                written = self.results(source, "--pattern", "causal", *gradient, *more)[0]
                values = {name: safetensors_file.decode(payload) for name, (_, _, payload) in written.items()}
                self.assertEqual(values["lse"][:9], [infinity] * 9)
                self.assertTrue(all(math.isfinite(x) for x in values["lse"][9:]))
                self.assertEqual(values["o"][:4], [0.0] * 4)
                if gradient:
                    self.assertEqual(values["dq"][:4], [0.0] * 4)
                    self.assertTrue(math.isnan(values["dsinks"][0]) and math.isfinite(values["dsinks"][1]))

    def test_a_row_that_makes_dsinks_nan_joins_the_sample(self):
        n, d = 4500, 128
        tensors = safetensors_file.qkv(n, 1, d)
        sinks = ("F32", [1], safetensors_file.encode([0.5]))
        arguments = ["--pattern", "causal", "--scale", 1, "--grad", "ones", "--verify"]
        source = self.write("in.safetensors", {**tensors, "sinks": sinks})
        report = self.run_json("run", "--input", source, "--output", self.path("right.safetensors"), *arguments)["verification"]
        self.assertEqual((report["query_rows"], report["from_outputs"][-1]), (64, "dsinks"))
        values = safetensors_file.decode(tensors["q"][2])
        values[7 * d : 8 * d] = [3e38] * d  # scores that float32 cannot hold, but float64 can, of keys that no other sampled row needs
        tensors["q"] = ("F32", [1, n, 1, d], safetensors_file.encode(values))
        source = self.write("in.safetensors", {**tensors, "sinks": sinks})
        report = self.run_json("run", "--input", source, "--output", self.path("out.safetensors"), *arguments, code=FAILED)["verification"]
        self.assertEqual(report["query_rows"], 65)
        failed = {tensor["name"] for tensor in report["tensors"] if not tensor["passed"]}
        self.assertTrue({"o", "lse"} <= failed, failed)

    def test_dropped_pairs_are_visible(self):
        nan = ("F32", [1, 2, 1, 1], safetensors_file.encode([math.nan, math.nan]))
        source = self.write("in.safetensors", {**safetensors_file.qkv(1, 1, 1), "q": nan})
        for kernel in ("reference", "portable"):
            self.results(source, "--dropout", 0.5, "--seed", 1, "--grad", "ones", "--kernel", kernel)
        values = [("F32", [1, 4, 1, 2], safetensors_file.encode([infinity, 1, 2, 3, 4, 5, 6, 7])) for infinity in (math.inf, math.nan)]
        for v in values:
            source = self.write("in.safetensors", {**safetensors_file.qkv(4, 1, 2), "v": v})
            for seed in range(4):
                self.results(source, "--dropout", 0.5, "--seed", seed, "--grad", "ones")

    def test_values_whose_sum_overflows(self):
        tensors = {**safetensors_file.qkv(5, 1, 2), "v": ("F32", [1, 5, 1, 2], safetensors_file.encode([2e38] * 10))}
        tensors["q"] = ("F32", [1, 5, 1, 2], safetensors_file.encode([0.0] * 10))
        source = self.write("in.safetensors", tensors)
        result = self.run_program("run", "--input", source, "--output", self.path("o"), "--verify", code=FAILED)
        self.assertIn("inf instead of 1.99999994e+38", result.stdout)
        self.assertIn("exceeds float32: docs/numerics.md", result.stdout)

    def test_an_output_that_is_a_link_stays_one(self):
        source = self.write("in.safetensors", safetensors_file.qkv(8, 2, 4))
        os.mkdir(self.path("deep"))
        for name in ("out", "report"):
            os.symlink("deep/" + name, self.path(name))
        for _ in range(2):  # what they point to is made, then replaced
            self.run_program("run", "--input", source, "--output", self.path("out"), "--json", self.path("report"))
            self.assertEqual(sorted(safetensors_file.read(self.path("deep/out"))[0]), ["lse", "o"])
            with open(self.path("deep/report"), encoding="utf-8") as file:
                self.assertEqual(json.load(file)["output"], self.path("out"))
            self.assertTrue(os.path.islink(self.path("out")) and os.path.islink(self.path("report")))
        self.assertEqual(sorted(os.listdir(self.path("deep"))), ["out", "report"])

    def test_a_kernel_for_each_pass(self):
        source = self.write("in.safetensors", safetensors_file.qkv(20, 2, 8))
        kernels = ["--kernel", "attend_f32_portable", "--kernel", "attend_backward_f32_reference"]
        found, _ = self.results(source, "--grad", "ones", *kernels)
        one, _ = self.results(source, "--grad", "ones", "--kernel", "reference")
        self.assertEqual(sorted(found), sorted(one))
        sizes = self.run_json("plan", "--tokens", 20, *kernels)["sizes"]
        self.assertEqual((sizes["attend"]["kernel"], sizes["attend_backward"]["kernel"]), (kernels[1], kernels[3]))
        bench = self.run_program("bench", "--tokens", 20, "--repetitions", 1, *kernels).stdout
        self.assertIn("ranks are threads with ", bench)

    def test_names_that_are_not_utf_8(self):
        source = os.path.join(os.fsencode(self.folder), b"in\xff.safetensors")
        safetensors_file.write(source, safetensors_file.qkv(8, 2, 4))
        result = self.run_program("run", "--input", os.fsdecode(source), "--output", self.path("out"), "--json")
        self.assertTrue(json.loads(result.stdout)["input"].endswith("/in\ufffd.safetensors"))
        self.assertTrue(json.loads(self.run_program("inspect", os.fsdecode(source), "--json").stdout)["file"].endswith("\ufffd.safetensors"))

    def test_memory_budget_shrinks_buckets_and_keeps_results(self):
        source = self.write("in.safetensors", safetensors_file.qkv(600, 2, 16))
        arguments = ["--pattern", "causal", "--ranks", 4, "--strategy", "ring"]
        free = self.run_json("run", "--input", source, "--output", self.path("free.safetensors"), *arguments)
        need = max(rank["memory_bytes"]["all"] for rank in free["by_rank"])
        tight = self.run_json("run", "--input", source, "--output", self.path("tight.safetensors"), *arguments, "--memory", need - 1)
        self.assertLess(tight["bucket_rows"], free["bucket_rows"])
        self.assertLess(max(rank["memory_bytes"]["all"] for rank in tight["by_rank"]), need)
        expected, _ = safetensors_file.read(self.path("free.safetensors"))
        self.assert_same_results(safetensors_file.read(self.path("tight.safetensors"))[0], expected, "tight")


    def test_every_rank_has_to_hold_the_memory_budget(self):
        source = self.write("in.safetensors", safetensors_file.qkv(445, 4, 16))
        pattern = ["--ranks", 113, "--sharding", "striped", "--pattern", "dilated:8x1,64x3@head_groups", "--threads", 1]
        refused = self.run_program("plan", "--input", source, *pattern, "--memory", 1, code=MEMORY)
        least = int(refused.stderr.split("the smallest possible is ")[1].split()[0])
        self.run_program("plan", "--input", source, *pattern, "--memory", least, "--rank", "all")
        output = self.path("out.safetensors")
        for command in (["run", "--input", source, "--output", output, "--grad", "ones"],
                        ["bench", "--tokens", 445, "--heads", 4, "--head-dim", 16, "--repetitions", 1]):  # fmt: skip
            refused = self.run_program(*command, *pattern, "--memory", least - 1, code=MEMORY)
            self.assertRegex(refused.stderr, f"rank [0-9]+ needs {least} bytes")
        self.assertFalse(os.path.exists(output))


class Report(ProgramTest):
    def source(self, tokens=64):
        return self.write("in.safetensors", safetensors_file.qkv(tokens, 4, 8))

    def test_json_has_the_documented_fields(self):
        report = self.run_json(
            "run", "--input", self.source(), "--output", self.path("out.safetensors"), "--pattern", "causal", "--ranks", 3,
            "--strategy", "ring", "--grad", "random:1", "--compare", 1, "--verify",
        )  # fmt: skip
        fields = {
            "version", "problem", "input", "output", "ranks", "transport", "strategy", "bucket_rows", "threads", "seconds",
            "forward_seconds", "backward_seconds", "tokens_per_second", "flops", "gigaflops_per_second", "one_rank_memory_bytes", "notes", "by_rank",
            "compared", "verification",
        }  # fmt: skip
        self.assertEqual(set(report), fields)
        self.assertEqual(report["version"], 1)
        self.assertEqual(len(report["by_rank"]), 3)
        self.assertTrue(report["verification"]["passed"])
        self.assertEqual([t["name"] for t in report["verification"]["tensors"]], ["o", "lse", "dq", "dk", "dv"])
        self.assertEqual(set(report["compared"]), {"ranks", "seconds", "speed_up", "efficiency"})
        pairs = sum(int(rank["pairs"]) for rank in report["by_rank"])
        self.assertEqual(pairs, 4 * 64 * 65 // 2)
        self.assertEqual(report["flops"], pairs * (4 * 8 + 10 * 8))
        for rank in report["by_rank"]:
            self.assertEqual(sum(rank["sent_bytes_to"]), rank["sent_bytes"])
            received = sum(other["sent_bytes_to"][rank["rank"]] for other in report["by_rank"])
            self.assertEqual(received, rank["received_bytes"])
            memory = dict(rank["memory_bytes"])
            self.assertEqual(memory.pop("all"), sum(memory.values()))
            self.assertTrue(0 <= rank["waiting_share"] <= 1)

    def test_other_numbers_of_ranks_are_planned_with_the_same_tiles(self):
        def one_rank(*tile):
            output = self.path("out.safetensors")
            return self.run_json("run", "--input", self.source(), "--output", output, "--ranks", 2, "--kernel", "portable", *tile)["one_rank_memory_bytes"]

        self.assertNotEqual(one_rank(), one_rank("--tile", "192x512"))

    def test_json_into_a_file_beside_the_summary(self):
        result = self.run_program(
            "run", "--input", self.source(), "--output", self.path("out.safetensors"), "--json", self.path("report.json")
        )
        self.assertIn("memory (forward pass)", result.stdout)
        with open(self.path("report.json"), encoding="utf-8") as file:
            self.assertIn('"by_rank"', file.read())

    def test_summary_has_what_a_newcomer_looks_for(self):
        result = self.run_program(
            "run", "--input", self.source(), "--output", self.path("out.safetensors"), "--pattern", "causal", "--ranks", 2,
            "--strategy", "ring", "--grad", "ones", "--compare", 1, "--verify",
        )  # fmt: skip
        for words in ("tokens/s", "flop/s", "waiting", "speed-up", "efficiency", "agrees with float64 on every element", "rank 1",
                      "buckets", "to 1", "by rank 0", self.path("out.safetensors")):  # fmt: skip
            self.assertIn(words, result.stdout)
        self.assertEqual(result.stderr, "")  # progress is for terminals

    def test_notes_name_what_is_not_used(self):
        tensors = safetensors_file.qkv(8, 2, 4)
        tensors["cu_seqlens"] = ("I32", [2], safetensors_file.encode([0, 8], "I32"))
        tensors["labels"] = ("I32", [8], safetensors_file.encode([0] * 8, "I32"))
        report = self.run_json("run", "--input", self.write("in.safetensors", tensors), "--output", self.path("out.safetensors"))
        self.assertEqual(len(report["notes"]), 2)
        self.assertIn("attention crosses them", report["notes"][0])
        self.assertIn("labels", report["notes"][1])
        gradient = self.write("grad.safetensors", {"do": safetensors_file.qkv(8, 4, 8)["q"], "extra": tensors["labels"]})
        arguments = ["--output", self.path("out.safetensors"), "--ranks", 2, "--sharding", "explicit:0-4;5-7"]
        report = self.run_json("run", "--input", self.source(8), *arguments, "--grad", gradient, "--compare", 3)
        self.assertEqual(len(report["notes"]), 2)
        self.assertIn("tensor extra of", report["notes"][0])
        self.assertIn("explicit lists are for 2 ranks", report["notes"][1])
        self.assertEqual(self.run_json("run", "--input", self.source(8), *arguments, "--compare", 2)["notes"], [])

    def test_automatic_says_what_it_rejected(self):
        report = self.run_json("run", "--input", self.source(), "--output", self.path("out.safetensors"), "--ranks", 4)
        self.assertIn(report["strategy"], STRATEGIES)
        self.assertTrue(all(rejected["reason"] for rejected in report["rejected"]))
        self.assertTrue(any(rejected["at_least"] for rejected in report["rejected"]))
        self.assertGreaterEqual(len(report["rejected"]), 5)

    def test_progress_appears_on_a_terminal_and_is_wiped(self):
        # Only a pass that lasts shows any: double the tokens until one does on this machine.
        for tokens in (1500, 3000, 6000, 12000):
            shown = self.shown_on_a_terminal(tokens)
            if b"backward" in shown:
                break
        self.assertEqual(self.shown_on_a_terminal(tokens, "dumb"), b"")
        self.assertIn(b"backward", shown)
        self.assertIn(b"%", shown)
        self.assertTrue(shown.endswith(b"\r\x1b[K"), shown[-40:])
        self.assertLessEqual(max(map(len, shown.split(b"\r\x1b[K"))), COLUMNS - 1, shown)

    def shown_on_a_terminal(self, tokens, kind="xterm"):
        source = self.write("long.safetensors", safetensors_file.qkv(tokens, 2, 16))
        leader, follower = pty.openpty()
        fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        with subprocess.Popen(
            [PROGRAM, "run", "--input", source, "--output", self.path("out.safetensors"), "--ranks", "2", "--kernel", "reference",
             "--strategy", "ring", "--bucket", "100", "--grad", "ones"],
            stdout=subprocess.DEVNULL, stderr=follower, env={**os.environ, "TERM": kind},
        ) as process:  # fmt: skip
            os.close(follower)
            shown = b""
            while True:
                try:
                    chunk = os.read(leader, 4096)
                except OSError:
                    break
                if not chunk:
                    break
                shown += chunk
        os.close(leader)
        self.assertEqual(process.returncode, 0)
        return shown

    def test_help_works_for_every_command(self):
        for command in ([], ["run"], ["plan"], ["verify"], ["bench"], ["capabilities"], ["selftest"], ["inspect"], ["doctor"], ["tune"]):
            result = self.run_program(*command, "--help")
            self.assertIn("usage: ringspan", result.stdout)
            self.assertLessEqual(max(len(line) for line in result.stdout.splitlines()), 100, command)
            self.assertEqual("exit codes" in result.stdout, not command, command)  # of the program, not of a command
        self.assertRegex(self.run_program("--version").stdout, r"^ringspan \d+\.\d+\.\d+$")
        self.assertIn("usage: ringspan COMMAND", call().stderr)


if __name__ == "__main__":
    unittest.main()
