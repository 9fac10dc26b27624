"""`ringspan plan`, `capabilities`, `selftest`, `bench` and `inspect`."""

import json
import os
import re
import resource
import shutil
import signal
import struct
import subprocess
import unittest
import xml.etree.ElementTree

import safetensors_file
from program import INPUT_OUTPUT, OK, PROGRAM, ProgramTest


class Plan(ProgramTest):
    def test_a_billion_tokens_over_1024_ranks(self):
        text = self.run_program("plan", "--tokens", 1_000_000_000, "--ranks", 1024, "--pattern", "dilated:2048x1,4096x2,8192x4").stdout
        for words in ("plan of rank 0 of 1024", "strategy", "rejected", "memory", "bytes"):
            self.assertIn(words, text)

    def test_json_of_two_ranks_agrees_on_what_passes_between_them(self):
        def plan(rank):
            arguments = ["plan", "--tokens", 1000, "--ranks", 3, "--rank", rank, "--pattern", "causal", "--strategy", "ring", "--json"]
            return json.loads(self.run_program(*arguments).stdout)

        plans = [plan(rank) for rank in range(3)]
        self.assertEqual(len({p["fingerprint"] for p in plans}), 1)
        self.assertEqual([p["rank"] for p in plans], [0, 1, 2])

    def test_a_misaligned_file_is_not_copied_for_its_shapes(self):
        tokens = 1 << 20
        header = {"pad": ("U8", [1], 1), **{name: ("F32", [1, tokens, 1, 64], tokens * 256) for name in "qkv"}}
        entries, offset = {}, 0
        for name, (dtype, shape, size) in header.items():
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(entries).encode()
        with open(self.path("sparse"), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)
        plan = ["plan", "--input", self.path("sparse")]
        least = lambda: resource.setrlimit(resource.RLIMIT_AS, (offset + (300 << 20),) * 2)  # noqa: E731
        self.run_program(*plan, preexec_fn=least)  # of 768 MiB, mapped

    def test_shapes_of_a_file(self):
        tensors = safetensors_file.qkv(20, 4, 8, kv_heads=2, dtype="BF16")
        tensors["cu_seqlens"] = ("I32", [3], safetensors_file.encode([0, 7, 20], "I32"))
        source = self.write("in.safetensors", tensors)
        of_file = self.run_program("plan", "--input", source, "--pattern", "documents", "--ranks", 2, "--json").stdout
        typed = self.run_program(
            "plan", "--tokens", 20, "--heads", 4, "--kv-heads", 2, "--head-dim", 8, "--dtype", "bf16", "--cu-seqlens", "0,7,20",
            "--pattern", "documents", "--ranks", 2, "--json",
        ).stdout  # fmt: skip
        self.assertEqual(json.loads(of_file), json.loads(typed))

    def test_plan_of_all_ranks(self):
        arguments = ["plan", "--tokens", 1000, "--ranks", 3, "--pattern", "causal", "--strategy", "ring", "--rank"]
        table = self.run_program(*arguments, "all")
        self.assertIn("plans of 3 ranks", table.stdout)
        self.assertEqual(table.stderr, "")
        rows = {line.split()[0]: line.split()[1] for line in table.stdout.splitlines() if line.startswith("  ") and len(line.split()) > 5}
        self.assertEqual([rows[name] for name in ("0", "1", "2", "all")], ["334", "333", "333", "1000"])
        whole = json.loads(self.run_program(*arguments, "all", "--json").stdout)
        for rank in whole["ranks"]:
            one = json.loads(self.run_program(*arguments, rank["rank"], "--json").stdout)
            self.assertEqual(whole["fingerprint"], one["fingerprint"])
            self.assertEqual(rank["modelled_nanoseconds"], one["modelled_nanoseconds"])
            for name in ("forward", "backward"):
                for field in ("pairs", "flops", "memory_bytes"):
                    self.assertEqual(rank[name][field], one[name][field])
                self.assertEqual(rank[name]["sent_bytes"], sum(peer["sent_bytes"] for peer in one[name]["traffic"]))
        self.assertIn("--rank (-1) must be a rank, from 0 on, or all", self.run_program(*arguments, "-1", code=2).stderr)
        self.assertIn("--rank", self.run_program(*arguments, "all", "--draw", "text", code=2).stderr)

    def test_plan_of_tensors_on_the_host(self):
        arguments = ["plan", "--tokens", 4000, "--device", "cuda", "--host-tensors", "--bucket", 500]
        slow = json.loads(self.run_program(*arguments, "--cost", "1e15,1,1", "--host-bandwidth", "1e6", "--json").stdout)
        self.assertEqual(slow["options"]["cost"], {
            "flops_per_second": 10**15, "bytes_per_second": 1, "message_nanoseconds": 1, "host_bytes_per_second": 10**6})
        copied = slow["forward"]["host_bytes"]
        time = slow["forward"]["host_nanoseconds"]
        self.assertAlmostEqual(time["copies"], 1000 * (copied["to_device"] + copied["to_host"]), delta=1000)
        self.assertAlmostEqual(time["exposed"], time["copies"], delta=0.01 * time["copies"])
        hidden = json.loads(self.run_program(*arguments, "--cost", "1e6,1,1", "--host-bandwidth", "1e9", "--json").stdout)
        self.assertLess(hidden["forward"]["host_nanoseconds"]["exposed"], 0.5 * hidden["forward"]["host_nanoseconds"]["copies"])
        self.assertIn("of it not hidden", self.run_program(*arguments).stdout)

    def test_forward_only_needs_less(self):
        both = json.loads(self.run_program("plan", "--tokens", 100, "--json").stdout)
        forward = json.loads(self.run_program("plan", "--tokens", 100, "--forward-only", "--json").stdout)
        self.assertIn("backward", both)
        self.assertLess(len(json.dumps(forward)), len(json.dumps(both)))

    def test_drawings(self):
        arguments = ["plan", "--tokens", 6, "--ranks", 2, "--pattern", "causal", "--strategy", "ring", "--heads", 1]
        text = self.run_program(*arguments, "--draw", "text").stdout
        rows = re.findall(r"[A.]{6}|[AB.]{6}", text)
        self.assertEqual(rows[-6:], ["A.....", "AA....", "AAA...", "BBBB..", "BBBBB.", "BBBBBB"])
        self.run_program(*arguments, "--draw", "svg:" + self.path("picture.svg"))
        with open(self.path("picture.svg"), encoding="utf-8") as file:
            picture = file.read()
        self.assertEqual(picture, self.run_program(*arguments, "--draw", "svg").stdout)
        self.assertTrue(xml.etree.ElementTree.fromstring(picture).tag.endswith("svg"))


class Tune(ProgramTest):
    tiny = ("tune", "--quick", "--tokens", 64, "--dtype", "float32,bf16", "--head-dim", "16,33")

    def plan(self, *arguments, **options):
        return json.loads(self.run_program("plan", "--tokens", 64, "--head-dim", 33, "--ranks", 2, *arguments, "--json", **options).stdout)["sizes"]

    def test_measures_and_writes_what_plans_read(self):
        environment = {**os.environ, "RINGSPAN_TUNE_FILE": self.path("deep/tune.json")}
        text = self.run_program(*self.tiny, env=environment).stdout
        self.assertIn("4 combinations of dtype and head_dim", text)
        self.assertIn("written to " + self.path("deep/tune.json"), text)
        self.assertEqual(len(re.findall(r"^(?:float32 |bfloat16|          ) .*(?:used|default.*)$", text, re.MULTILINE)), 12, text)
        with open(self.path("deep/tune.json"), encoding="utf-8") as file:
            written = json.load(file)
        (machine,) = written["machines"]
        measured = [(entry["dtype"], entry["head_dim"]) for entry in machine["entries"]]
        self.assertEqual(measured, [("float32", 16), ("float32", 33), ("bfloat16", 16), ("bfloat16", 33)])

        own = self.plan(env=environment)["attend"]
        entry = machine["entries"][1]
        self.assertEqual(entry["attend"]["kernel"], own["kernel"])
        entry["attend"].update(tile_queries=2 * self.plan()["attend"]["tile_queries"], tile_keys=128)
        entry["bucket_rows"] = 20
        with open(self.path("deep/tune.json"), "w", encoding="utf-8") as file:
            json.dump(written, file)
        sizes = self.plan("--strategy", "ring", env=environment)
        self.assertEqual((sizes["attend"]["tile_keys"], sizes["attend"]["source"]), (128, "tuned"))
        self.assertEqual(sizes["bucket"], {"rows": 20, "source": "tuned"})
        self.assertIn(self.path("deep/tune.json"), sizes["tuned_by"])
        given = self.plan("--tile", "96x64", "--bucket", 7, "--strategy", "ring", env=environment)
        self.assertEqual((given["attend"]["tile_keys"], given["attend"]["source"]), (64, "given"))
        self.assertEqual(given["bucket"], {"rows": 7, "source": "given"})
        self.assertEqual(self.plan()["attend"]["source"], "default")

        entry["date"] = "\x1b]0;title\x07\x1b[31m"
        with open(self.path("deep/tune.json"), "w", encoding="utf-8") as file:
            json.dump(written, file)
        text = self.run_program("plan", "--tokens", 64, "--head-dim", 33, "--ranks", 2, env=environment).stdout
        self.assertIn("?]0;title??[31m", text)
        self.assertNotIn("\x1b", text)

    def test_dry_run_tells_what_was_tried(self):
        report = self.run_json(*self.tiny[:4], "--head-dim", 16, "--dtype", "f16", "--kernel", "portable", "--dry-run")
        self.assertIsNone(report["file"])
        (combination,) = report["combinations"]
        self.assertEqual(combination["forward"]["kernel"], "attend_f16_portable")
        for size in ("forward", "backward", "bucket"):
            tried = combination[size]["tried"]
            self.assertEqual(tried[0]["size"], combination[size]["default"])
            self.assertTrue(all(one["seconds"] > 0 for one in tried))
            self.assertIn(combination[size]["best"], [one["size"] for one in tried])
        self.assertGreater(len(combination["forward"]["tried"]), 4)

    def test_the_reference_has_nothing_to_tune_but_buckets(self):
        report = self.run_json("tune", "--quick", "--tokens", 64, "--head-dim", 8, "--dtype", "f32", "--kernel", "reference", "--dry-run")
        self.assertEqual(len(report["combinations"][0]["forward"]["tried"]), 1)
        self.assertFalse(report["combinations"][0]["forward"]["used"])

    def test_refusals(self):
        self.assertIn("RINGSPAN_TUNE_FILE is empty", self.run_program(*self.tiny, code=2).stderr)
        for option, names in (("--head-dim", "8,16,8"), ("--dtype", "bf16,bfloat16")):
            error = self.run_program("tune", option, names, "--dry-run", code=2).stderr
            self.assertIn(f"{option} ({names}) names one of them twice", error)
        broken = self.path("broken.json")
        with open(broken, "w", encoding="utf-8") as file:
            file.write("{")
        environment = {**os.environ, "RINGSPAN_TUNE_FILE": broken}
        for command in (self.tiny, ("plan", "--tokens", 64), ("verify", "nq=4 h=1 d=4")):
            error = self.run_program(*command, env=environment, code=6).stderr
            self.assertIn(f"tune file {broken}: is not JSON; remove it and run `ringspan tune`, or set RINGSPAN_TUNE_FILE=", error)
        for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
            make(self.path(name))
            environment["RINGSPAN_TUNE_FILE"] = self.path(name)
            for command in (self.tiny, ("plan", "--tokens", 64)):
                error = self.run_program(*command, env=environment, code=6).stderr
                self.assertIn(f"tune file {self.path(name)}: is not a regular file; name one, or set RINGSPAN_TUNE_FILE=", error)
        environment["RINGSPAN_TUNE_FILE"] = os.path.join(broken, "tune.json")
        result = self.run_program(*self.tiny, env=environment, code=6)
        self.assertIn("cannot be written", result.stderr)
        self.assertEqual(result.stdout, "")  # before anything is measured
        self.assertIn("must be queries x keys, each in [1, 1048576], such as 96x256", self.run_program("plan", "--tokens", 9, "--tile", "96", code=2).stderr)
        error = self.run_program("plan", "--tokens", 9, "--kernel", "portable", "--backward-tile", "33x48", code=2).stderr
        self.assertIn("the queries of a tile (33) must be 0 or a multiple of 6 from 30 to 510", error)


    def test_what_cannot_be_written_is_told_all_the_same(self):
        environment = {**os.environ, "RINGSPAN_TUNE_FILE": self.path("tune.json")}
        few_bytes = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))  # noqa: E731
        result = self.run_program(*self.tiny, "--json", env=environment, code=6, preexec_fn=few_bytes, restore_signals=False)
        self.assertIn("tune.json: cannot be written: File too large", result.stderr)
        report = json.loads(result.stdout)
        self.assertIsNone(report["file"])
        self.assertEqual(len(report["combinations"]), 1)
        self.assertGreater(report["combinations"][0]["forward"]["default_seconds"], 0)
        result = self.run_program(*self.tiny, env=environment, code=6, preexec_fn=few_bytes, restore_signals=False)
        self.assertRegex(result.stdout, r"(?m)^float32 +16  forward ")

    def test_what_was_measured_is_kept_where_nobody_reads_on(self):
        environment = {**os.environ, "RINGSPAN_TUNE_FILE": self.path("tune.json")}
        with subprocess.Popen([PROGRAM, *map(str, self.tiny)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            process.stdout.close()  # as after `| head`
            process.wait(timeout=600)
        self.assertEqual(process.returncode, -signal.SIGPIPE)
        with open(self.path("tune.json"), encoding="utf-8") as file:
            self.assertEqual(len(json.load(file)["machines"][0]["entries"]), 1)


class Capabilities(ProgramTest):
    def test_table_and_json_tell_the_same(self):
        report = self.run_json("capabilities")
        cells = report["cells"]
        axes = {axis: sorted({cell[axis] for cell in cells}) for axis in ("pattern", "option", "dtype", "pass", "strategy")}
        self.assertEqual(len(cells), len(axes["pattern"]) * len(axes["option"]) * 3 * 2 * 6)
        text = self.run_program("capabilities").stdout
        for name in axes["pattern"] + axes["option"] + axes["strategy"]:
            if name != "-":
                self.assertIn(name, text)
        for reason in {cell["reason"] for cell in cells if not cell["supported"]}:
            self.assertIn(reason, text)
        self.assertTrue(any(name.endswith("reference") for name in report["kernels"]["attend"]))

    def test_plan_refuses_what_the_table_refuses(self):
        cells = self.run_json("capabilities")["cells"]
        refused = next(c for c in cells if c["option"] == "buckets of rows" and c["strategy"] == "ulysses")
        self.assertFalse(refused["supported"])
        result = self.run_program("plan", "--tokens", 24, "--ranks", 2, "--strategy", "ulysses", "--bucket", 4, code=3)
        self.assertIn(refused["reason"], result.stderr)


class Tools(ProgramTest):
    def test_selftest(self):
        report = self.run_json("selftest", "--ranks", 3)
        self.assertEqual(report["version"], 1)
        self.assertEqual([r["transport"] for r in report["transports"]], ["processes", "threads"])
        for result in report["transports"]:
            self.assertTrue(result["passed"])
            self.assertEqual([pair["ranks"] for pair in result["pairs"]], [[0, 1], [0, 2], [1, 2]])
            for pair in result["pairs"]:
                self.assertGreater(pair["latency_seconds"], 0)
                self.assertGreater(pair["bytes_per_second"], 0)
        self.assertIn("all pairs arrived right", self.run_program("selftest", "--ranks", 2, "--transport", "threads").stdout)

    def test_bench(self):
        for transport in ("threads", "processes"):
            report = self.run_json(
                "bench", "--tokens", 96, "--heads", 2, "--head-dim", 16, "--ranks", 3, "--pattern", "causal", "--strategy", "ring",
                "--repetitions", 3, "--transport", transport, "--alibi", "--sinks",
            )  # fmt: skip
            self.assertTrue(report["verified"])
            self.assertEqual(report["transport"], transport)
            self.assertEqual(len(report["ranks"]["seconds"]), 3)
            self.assertEqual(len(report["one_rank"]["seconds"]), 3)
            self.assertGreater(report["speed_up"], 0)
        text = self.run_program("bench", "--tokens", 64, "--heads", 2, "--ranks", 2, "--repetitions", 2, "--forward-only").stdout
        for words in ("agrees with float64", "median of 2", "2 ranks", "1 rank", "speed-up"):
            self.assertIn(words, text)

    def test_inspect(self):
        tensors = safetensors_file.qkv(30, 2, 4, dtype="F16")
        tensors["cu_seqlens"] = ("I32", [4], safetensors_file.encode([0, 4, 6, 30], "I32"))
        path = self.write("in.safetensors", tensors, {"source": "a test"})
        text = self.run_program("inspect", path).stdout
        for words in ("4 tensors", "(1, 30, 2, 4)", "F16", "3 documents of 2 to 24 tokens (median 4), 30 in all", "source: a test"):
            self.assertIn(words, text)
        report = self.run_json("inspect", path)
        self.assertEqual(report["documents"], [{"tensor": "cu_seqlens", "count": 3, "tokens": 30, "shortest": 2, "median": 4, "longest": 24}])
        self.assertEqual([t["name"] for t in report["tensors"]], ["q", "k", "v", "cu_seqlens"])
        self.assertEqual(report["metadata"], {"source": "a test"})

    def test_inspect_calls_nonsense_nonsense(self):
        for offsets, words in [
            ([0, 9, 4, 30], "not ascending, so not offsets: entry 2 is 4 after 9"),
            ([0, 2**31 - 1, -(2**31)], "not ascending, so not offsets: entry 2 is -2147483648 after 2147483647"),
            ([-5, 9], "not offsets: entry 0 (-5) must be 0"),
        ]:
            path = self.write("in.safetensors", {"cu_seqlens": ("I32", [len(offsets)], safetensors_file.encode(offsets, "I32"))})
            self.assertIn("cu_seqlens: " + words + "\n", self.run_program("inspect", path).stdout)
            self.assertEqual(self.run_json("inspect", path)["documents"], [{"tensor": "cu_seqlens", "wrong": words}])
        path = self.write("in.safetensors", {"cu_seqlens": ("I32", [2], safetensors_file.encode([0, 7], "I32"))})
        self.assertIn("1 document of 7 to 7 tokens (median 7), 7 in all", self.run_program("inspect", path).stdout)

    def test_doctor(self):
        report = self.run_json("doctor")
        self.assertEqual(report["machine"]["usable"], len(os.sched_getaffinity(0)))
        self.assertGreater(report["machine"]["memory_bytes"], report["machine"]["available_bytes"])
        known = {name.rsplit("_", 1)[1] for name in self.run_json("capabilities")["kernels"]["attend"]}
        self.assertEqual({implementation["name"] for implementation in report["implementations"]}, known)
        here = {implementation["name"] for implementation in report["implementations"] if implementation["here"]}
        for dtype, names in report["kernels"].items():
            for name in names.values():
                self.assertIn(name.rsplit("_", 1)[1], here, dtype)
        text = self.run_program("doctor").stdout
        self.assertTrue(any("CUDA" in line or "cuda" in line for line in report["devices"]))
        for words in [*known, *report["devices"], "memory", "advice", report["kernels"]["bfloat16"]["attend_backward"]]:
            self.assertIn(words, text)

    def test_doctor_says_that_a_tune_file_is_damaged(self):
        with open(self.path("tune.json"), "w", encoding="ascii") as file:
            file.write("junk")
        environment = os.environ | {"RINGSPAN_TUNE_FILE": self.path("tune.json")}
        self.assertIn("is not JSON; remove it", self.run_program("doctor", env=environment).stdout.split("advice")[1])

    def test_a_home_that_may_not_be_entered_holds_no_tune_file(self):
        os.chmod(self.folder, 0o755)
        program = shutil.copy(PROGRAM, self.path("ringspan"))
        os.mkdir(self.path("home"), 0)
        environment = {"HOME": self.path("home")}
        nobody = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        plan = subprocess.run([program, "plan", "--tokens", "8"], capture_output=True, text=True, check=False, env=environment, **nobody)
        self.assertEqual((plan.returncode, plan.stderr), (OK, ""))
        environment["RINGSPAN_TUNE_FILE"] = self.path("home/tune.json")
        plan = subprocess.run([program, "plan", "--tokens", "8"], capture_output=True, text=True, check=False, env=environment, **nobody)
        self.assertEqual(plan.returncode, INPUT_OUTPUT)
        self.assertIn("cannot be read: Permission denied", plan.stderr)

    def test_doctor_sees_which_processors_it_may_use(self):
        one = min(os.sched_getaffinity(0))
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {one})
        try:
            report = self.run_json("doctor")
            self.assertEqual(report["machine"]["usable"], 1)
            if report["machine"]["processors"] > 1:
                self.assertIn(f"this process may use 1 of {report['machine']['processors']} processors", "\n".join(report["advice"]))
            bench = self.run_program("bench", "--tokens", 64, "--head-dim", 8, "--heads", 1, "--ranks", 1, "--repetitions", 1).stdout
            self.assertIn("1 thread each", bench)
        finally:
            os.sched_setaffinity(0, before)

    def test_every_json_is_one_object_with_a_version(self):
        source = self.write("in.safetensors", safetensors_file.qkv(8, 2, 4))
        small = ["--tokens", 64, "--head-dim", 8]
        for command in (
            ["run", "--input", source, "--output", self.path("out")], ["verify", "nq=4 h=1 d=4"], ["verify", "--random", 1],
            ["bench", *small, "--repetitions", 1], ["capabilities"], ["selftest", "--ranks", 2], ["inspect", source], ["doctor"],
            ["tune", "--quick", *small, "--dtype", "f32", "--kernel", "reference", "--dry-run"],
        ):  # fmt: skip
            self.assertEqual(self.run_json(*command)["version"], 1, command)
        self.assertEqual(self.run_json("plan", *small)["schema"], 1)

    def test_the_program_runs_from_anywhere(self):
        self.run_program("capabilities", cwd=os.sep)
        for name in ("libfmt.so.9", "libstdc++.so.6", "libcuda.so.1", "libcudnn.so.9", "libnccl.so.2"):
            with open(self.path(name), "w", encoding="ascii") as file:
                file.write("what lies here is no library of the program's")
        self.run_program("capabilities", cwd=self.folder)
        here, there = (self.run_program("doctor", cwd=folder).stdout.split("devices")[1] for folder in (self.folder, os.sep))
        self.assertEqual(here, there)


if __name__ == "__main__":
    unittest.main()
