"""Every error of the program: its words on standard error, its exit code, nothing on standard output, no file left."""

import json
import os
import pathlib
import resource
import stat
import struct
import subprocess
import unittest

import safetensors_file
from program import ARGUMENTS, INPUT_OUTPUT, MEMORY, OK, PROGRAM, UNSUPPORTED, ProgramTest


class Errors(ProgramTest):
    def fails(self, arguments, code, *words):
        result = self.run_program(*arguments, code=code)
        self.assertEqual(result.stdout, "", arguments)
        self.assertTrue(result.stderr.startswith("ringspan: error: "), result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)
        self.assertNotIn("what()", result.stderr)
        self.assertNotIn("internal error", result.stderr)
        return result


class Usage(Errors):
    def test_unknown_names_are_named_with_the_nearest_known_one(self):
        self.fails(["rnu"], ARGUMENTS, "unknown command rnu; did you mean run?", "see `ringspan --help`")
        self.fails(["frobnicate"], ARGUMENTS, "unknown command frobnicate\n")
        self.fails(["--verison"], ARGUMENTS, "unknown option --verison; did you mean --version?")
        self.fails(["plan", "--tokens", 8, "--stratgey", "ring"], ARGUMENTS, "plan: unknown option --stratgey; did you mean --strategy?",
                   "see `ringspan plan --help`")  # fmt: skip
        self.fails(["plan", "--tokens", 8, "--xyzzyxyzzy=3"], ARGUMENTS, "plan: unknown option --xyzzyxyzzy\n")
        self.fails(["run", "--input", "a", "--output", "b", "--seqential"], ARGUMENTS, "did you mean --sequential?")

    def test_missing_and_superfluous_arguments(self):
        self.assertEqual(self.run_program(code=ARGUMENTS).stdout, "")
        self.fails(["run"], ARGUMENTS, "--input is required")
        self.fails(["run", "--input", "x"], ARGUMENTS, "--output is required")
        self.fails(["inspect"], ARGUMENTS, "FILE is required")
        self.fails(["verify"], ARGUMENTS, "verify takes problems or --random N")
        self.fails(["plan", "--tokens"], ARGUMENTS, "--tokens needs a value")
        self.fails(["plan", "--tokens", 8, "more"], ARGUMENTS, "plan: unexpected argument more")
        self.fails(["plan"], ARGUMENTS, "plan needs --tokens N or --input FILE")

    def test_unknown_words_come_before_what_is_missing(self):
        self.fails(["verify", "--starts-k", "0,5"], ARGUMENTS, "verify: unknown option --starts-k; a problem is words, such as nq=1000 h=8 d=64")
        self.fails(["run", "--bogus"], ARGUMENTS, "run: unknown option --bogus\n")
        self.fails(["help", "run"], ARGUMENTS, "unknown command help\n")
        self.fails(["run", "plan"], ARGUMENTS, "run: unexpected argument plan\n")

    def test_options_are_given_once(self):
        self.fails(["plan", "--tokens", 8, "--tokens", 9], ARGUMENTS, "--tokens is given twice", "see `ringspan plan --help`")
        self.fails(["run", "--input", "a", "--output", "b", "--output", "c"], ARGUMENTS, "--output is given twice")
        for command in (["plan", "--tokens", 8], ["bench", "--tokens", 8], ["verify", "nq=4 h=1 d=4"], ["capabilities"], ["doctor"]):
            self.fails([*command, "--json", "--json"], ARGUMENTS, "--json is given twice")
        self.fails(["plan", "--tokens", 8, "--alibi", "--alibi"], ARGUMENTS, "--alibi is given twice")
        for command in ("plan", "bench"):
            self.fails([command, "--tokens", 8, "--kernel", "portable", "--kernel", "reference"], ARGUMENTS,
                       "--kernel reference: the forward pass has --kernel portable")  # fmt: skip
            self.fails([command, "--tokens", 8, *["--kernel", "attend_backward_f32_portable"] * 2], ARGUMENTS, "the backward pass has")

    def test_options_that_would_change_nothing(self):
        self.fails(["plan", "--tokens", 8, "--draw", "text", "--json"], ARGUMENTS, "--json excludes --draw")
        self.fails(["plan", "--tokens", 8, "--draw", "text", "--ranks", 2, "--rank", 7], ARGUMENTS, "--rank excludes --draw")
        self.fails(["plan", "--tokens", 8, "--layout", "nonsense"], ARGUMENTS, "layout (nonsense) must be bshd")
        self.fails(["plan", "--tokens", 8, "--layout", "bshd"], ARGUMENTS, "--layout requires --input")
        for command in ("plan", "bench"):
            forward = [command, "--tokens", 8, "--forward-only"]
            self.fails([*forward, "--backward-tile", "7x7"], ARGUMENTS, "--backward-tile is given, but there is no backward pass")
            self.fails([*forward, "--kernel", "attend_backward_f32_portable"], ARGUMENTS, "attend_backward_f32_portable is given, but there is no")
        source = self.write("in.safetensors", safetensors_file.qkv(8, 2, 4))
        for command in (["plan", "--tokens", 8], ["bench", "--tokens", 8], ["run", "--input", source, "--output", self.path("o")]):
            self.fails([*command, "--seed", 3], ARGUMENTS, "--seed requires --dropout")
            self.fails([*command, "--kernel", ""], ARGUMENTS, "--kernel () must be the name of a kernel, such as reference")
            for strategy in ("auto", "ring"):
                self.fails([*command, "--ranks", 2, "--computing-ranks", 1, "--strategy", strategy], ARGUMENTS,
                           f"--computing-ranks (1) is for --strategy local only, not {strategy}")  # fmt: skip
            self.fails([*command, "--seed", 5, "--dropout", 0], ARGUMENTS, "--seed (5) is for dropout, but --dropout is 0")
        self.fails(["verify", "--random", 1, "--json", "--verbose"], ARGUMENTS, "--json excludes --verbose")
        for words, message in [
            ("dlse=1 backward=0", "dlse=1 is for the backward pass, but backward is 0"),
            ("seed=5", "seed=5 is for dropout, but dropout is 0"),
            ("kernel=", "kernel=: expected the name of a kernel, such as reference"),
        ]:
            self.fails(["verify", "nq=4 h=1 d=4 " + words], ARGUMENTS, message)
        self.fails(["plan", "--tokens", 8, "--host-bandwidth", 1], ARGUMENTS, "--host-bandwidth requires --host-tensors")
        self.fails(["plan", "--tokens", 8, "--device", "cuda", "--threads", 4], UNSUPPORTED,
                   "--threads (4) is for kernels of the CPU, but this rank computes on cuda")  # fmt: skip
        for more in (["--seed", 3], ["--first", 4], ["--verbose"]):
            self.fails(["verify", "nq=4 h=1 d=4", *more], ARGUMENTS, f"{more[0]} requires --random")

    def test_values_that_are_empty_are_not_left_out(self):
        source = self.write("in.safetensors", safetensors_file.qkv(8, 2, 4))
        self.fails(["run", "--input", source, "--output", self.path("o"), "--grad", ""], ARGUMENTS, "--grad () must be a file, random:SEED or ones")
        self.fails(["plan", "--input", ""], INPUT_OUTPUT, "'': is not the name of a file")
        self.fails(["plan", "--tokens", 8, "--input", ""], ARGUMENTS, "--tokens and --input exclude each other")
        self.fails(["inspect", ""], INPUT_OUTPUT, "'': is not the name of a file")

    def test_values_are_quoted_as_they_were_given(self):
        for command in (["plan", "--tokens", 8], ["verify", "nq=4 h=1 d=4"]):
            self.fails([*command, "--memory", "0.4"], ARGUMENTS, "--memory (0.4) must be at least 1 byte")
        self.fails(["verify", "nq=20 h=1 d=4 pattern=documents cu_q=0,20,"], ARGUMENTS,
                   "cu_q must be whole numbers up to 2147483647 separated by commas, but entry 2 is ''")  # fmt: skip
        self.fails(["plan", "--tokens", 8, "--json=foo"], ARGUMENTS, "--json (foo) takes true, false or no value")

    def test_problems_are_read_before_the_first_is_run(self):
        for wrong, message in (("nq=4 h=1 d=4 speed=9", "unknown word speed=9"), ("nq=4 h=3 hkv=2 d=4", "heads (3) must be a multiple of kv_heads (2)")):
            self.fails(["verify", "nq=4 h=1 d=4", wrong], ARGUMENTS, message)

    def test_seeds(self):
        plan, verify = ["plan", "--tokens", 8, "--dropout", 0.5], ["verify", "--random", 1]
        for command in (plan, verify):
            for seed in ("-1", 1 << 64, "1.5"):
                self.fails([*command, f"--seed={seed}"], ARGUMENTS, f"--seed ({seed}) must be a whole number in [0, 2^64)")
        most = (1 << 64) - 1
        self.assertIn(f'"seed":{most},', self.run_program(*plan, "--seed", most, "--json").stdout)
        self.assertIn(f"seed {most}", self.run_program(*verify, "--seed", most).stdout)

    def test_numbers(self):
        for option, value, words in [
            ("--tokens", "many", "--tokens (many) must be a whole number"),
            ("--tokens", "1e6", "--tokens (1e6) must be a whole number"),
            ("--tokens", "-1", "--tokens (-1) must be in [0, "),
            ("--tokens", "99999999999999999999", "must be a whole number"),
            ("--ranks", "0", "--ranks (0) must be in [1, "),
            ("--heads", "0", "--heads (0) must be in [1, "),
            ("--kv-heads", "3", "heads (8) must be a multiple of kv_heads (3)"),
            ("--head-dim", "257", "head_dim (257) must be in [1, 256]"),
            ("--head-dim-v", "300", "head_dim_v (300) must be in [1, 256]"),
            ("--batch", "0", "--batch (0) must be in [1, "),
            ("--threads", "0", "--threads (0) must be in [1, "),
            ("--rank", "1", "rank (1) must be in [0, 1)"),
            ("--computing-ranks", "0", "--computing-ranks (0) must be in [1, "),
            ("--dtype", "int8", "int8"),
            ("--softcap", "-1", "softcap (-1) must be 0, or finite and at least 1.1754944e-38"),
            ("--softcap", "1e-39", "softcap (1e-39) must be 0, or finite and at least 1.1754944e-38"),
            ("--softcap", "big", "--softcap (big) must be a number"),
            ("--softcap", "1e-50", "--softcap (1e-50) must be a number that float32 can hold"),
            ("--scale", "nan", "--scale (nan) must be a number"),
            ("--scale", "1e-46", "--scale (1e-46) must be a number that float32 can hold"),
            ("--scale", "1e39", "--scale (1e39) must be a number that float32 can hold"),
            ("--scale", "0", "--scale (0) must not be 0"),
            ("--scale", "-0.0", "--scale (-0.0) must not be 0"),
            ("--dropout", "1e-50", "--dropout (1e-50) must be a number that float32 can hold"),
            ("--dropout", "1", "dropout (1) must be in [0, 1)"),
            ("--tokens", str((1 << 40) + 1), "--tokens (1099511627777) must be in [0, 1099511627776]"),
            ("--tile", "9600000x256", "--tile (9600000x256) must be queries x keys, each in [1, 1048576], such as 96x256"),
            ("--seed", "x", "--seed (x) must be a whole number"),
            ("--bucket", "0", "--bucket (0) must be a number of rows >= 1, none or auto"),
            ("--bucket", "some", "--bucket (some) must be a number of rows >= 1, none or auto"),
            ("--memory", "lots", "--memory (lots) must be a number of bytes, such as 8GiB, 512MiB or 1000000"),
            ("--memory", "8 parsecs", "--memory (8 parsecs) must be a number of bytes"),
            ("--memory", "8e", "must be a number of bytes"),
            ("--memory", "-1", "must be a number of bytes"),
            ("--memory", "nan", "must be a number of bytes"),
            ("--memory", "inf", "must be a number of bytes"),
            ("--memory", "1e19", "must be a number of bytes"),
            ("--memory", "99999999TiB", "must be a number of bytes"),
            ("--memory", "0", "--memory (0) must be at least 1 byte"),
            ("--cost", "1,2", "--cost (1,2) must be F,B,L: flops/s, bytes/s, nanoseconds per message"),
            ("--cost", "1,2,3,4", "must be F,B,L"),
            ("--cost", "a,2,3", "--cost (a) must be a number"),
            ("--cost", "1e30,2,3", "must stay below 9e18"),
            ("--cost", "0.5,1,1", "--cost (0.5,1,1) must have rates of at least 1"),
            ("--host-bandwidth", "0", "--host-bandwidth (0) must be in [1, 9e18)"),
            ("--strategy", "magic", "magic"),
            ("--sharding", "diagonal", "diagonal"),
            ("--sharding-k", "explicit:0-3", "sharding_k"),
            ("--cu-seqlens", "0,8", "cu_seqlens_q is given, but the pattern has no documents"),
            ("--cu-seqlens", "0,x", "--cu-seqlens must be whole numbers separated by commas, but entry 1 is 'x'"),
            ("--cu-seqlens", "0,-8", "--cu-seqlens: offset 1 (-8) must be in [0, 2147483647]"),
            ("--lengths", "9", "lengths_q[0] (9) must be in [0, 8]"),
            ("--starts-k", "9", "starts_k[0] (9) must be in [0, 8]"),
            ("--draw", "ascii", "--draw (ascii) must be text, svg or svg:FILE"),
            ("--kernel", "attend_f32_abacus", "attend_f32_abacus"),
        ]:
            tokens = [] if option == "--tokens" else ["--tokens", 8]
            self.fails(["plan", *tokens, f"{option}={value}"], ARGUMENTS, words)

    def test_sizes_of_memory(self):
        def budget(text):
            return json.loads(self.run_program("plan", "--tokens", 8, "--memory", text, "--json").stdout)["options"]["memory_budget"]

        for text, value in {"8388608": 1 << 23, "8MiB": 1 << 23, "8 mib": 1 << 23, "1.5GiB": 3 << 29, "9MB": 9_000_000, "2G": 2_000_000_000,
                            "1e9": 10**9, "7.5e3 kB": 7_500_000, "1PiB": 1 << 50, "2pb": 2 * 10**15}.items():
            self.assertEqual(budget(text), value, text)

    def test_pattern_errors_point_at_the_character(self):
        result = self.fails(["plan", "--tokens", 8, "--pattern", "causal & windw:3"], ARGUMENTS, "unknown term 'windw'")
        lines = result.stderr.splitlines()
        self.assertEqual(lines[1].index("windw"), lines[2].index("^"))

    def test_unsupported_combinations_and_impossible_budgets(self):
        self.fails(["plan", "--tokens", 64, "--ranks", 2, "--strategy", "ulysses", "--bucket", 4], UNSUPPORTED, "ulysses", "bucket")
        self.fails(["plan", "--tokens", 8, "--pattern", "dilated:4x1@torchscale", "--sinks"], UNSUPPORTED,
                   "no strategy supports this combination: ", "torchscale")  # fmt: skip
        self.fails(["plan", "--tokens", 100000, "--ranks", 2, "--memory", "1MiB"], MEMORY, "the smallest possible is", "takes most of it")
        self.fails(["bench", "--tokens", 40000, "--ranks", 40000, "--strategy", "exchange", "--heads", 1, "--head-dim", 8], MEMORY,
                   "the plans of 40000 ranks take about", "in one process, this machine has")  # fmt: skip

    def test_selftest_and_bench(self):
        self.fails(["selftest", "--ranks", 1], ARGUMENTS, "--ranks (1) must be in [2, 64]")
        self.fails(["selftest", "--ranks", 65], ARGUMENTS, "--ranks (65) must be in [2, 64]")
        self.fails(["selftest", "--transport", "pigeons"], ARGUMENTS, "--transport (pigeons) must be threads, processes or all")
        self.fails(["selftest", "--deadline", 0], ARGUMENTS, "--deadline (0) must be positive")
        self.fails(["bench", "--tokens", 8, "--transport", "pigeons"], ARGUMENTS, "--transport (pigeons) must be threads or processes")
        self.fails(["bench", "--tokens", 8, "--transport", "nccl"], UNSUPPORTED, "--transport nccl moves messages between GPUs")
        self.fails(["bench", "--tokens", 8, "--repetitions", 0], ARGUMENTS, "--repetitions (0) must be in [1, ")


class Files(Errors):
    def fails_on(self, tensors, code, *words, more=()):
        source = self.write("in.safetensors", tensors)
        output = self.path("out.safetensors")
        self.fails(["run", "--input", source, "--output", output, *more], code, *words)
        self.assertFalse(os.path.exists(output))
        self.assertEqual([name for name in os.listdir(self.folder) if "partial" in name], [])

    def test_what_is_not_there(self):
        missing = self.path("missing.safetensors")
        self.fails(["inspect", missing], INPUT_OUTPUT, missing, "No such file or directory")
        self.fails(["inspect", self.folder], INPUT_OUTPUT, "is not a regular file")
        self.fails(["run", "--input", missing, "--output", self.path("o")], INPUT_OUTPUT, missing)
        self.fails(["plan", "--input", missing], INPUT_OUTPUT, missing)
        tensors = safetensors_file.qkv(8, 2, 4)
        for name in "qkv":
            some = {key: value for key, value in tensors.items() if key != name}
            self.fails_on(some, INPUT_OUTPUT, f"has no tensor '{name}'")
        self.fails_on(tensors, INPUT_OUTPUT, "No such file", more=["--grad", missing])
        self.fails_on(tensors, INPUT_OUTPUT, "has no tensor cu_seqlens, which `documents` in the pattern needs", more=["--pattern", "documents"])

    def test_hostile_files(self):
        def raw(content):
            path = self.path("raw.safetensors")
            with open(path, "wb") as file:
                file.write(content)
            return path

        def with_header(header, data=b""):
            text = header if isinstance(header, bytes) else json.dumps(header).encode()
            return struct.pack("<Q", len(text)) + text + data

        entry = {"dtype": "F32", "shape": [1, 1, 1, 1], "data_offsets": [0, 4]}
        for content in [
            b"",
            b"\x01",
            struct.pack("<Q", 1 << 62) + b"{}",
            struct.pack("<Q", 100) + b"{}",
            with_header(b"[]"),
            with_header(b"{" * 100000),
            with_header(b'{"q": 3}'),
            with_header({"q": entry}),  # no data
            with_header({"q": {**entry, "data_offsets": [0, 1 << 60]}}, b"1234"),
            with_header({"q": {**entry, "shape": [1 << 40, 1 << 40, 1, 1]}}, b"1234"),
            with_header({"q": {**entry, "shape": [-1, 1, 1, 1]}}, b"1234"),
            with_header({"q": {**entry, "dtype": "F77"}}, b"1234"),
            with_header({"q": entry, "k": entry}, b"1234"),  # overlap
            with_header(json.dumps({"q": entry}).encode() + b"\0", b"1234"),
        ]:
            path = raw(content)
            for arguments in (["inspect", path], ["run", "--input", path, "--output", self.path("out")], ["plan", "--input", path]):
                self.fails(arguments, INPUT_OUTPUT, path)

    def test_control_characters_of_a_file_do_not_reach_the_terminal(self):
        path = self.write("in.safetensors", {"a\x1b[31m": ("F32", [1], b"1234")}, {"note": "\x1b]0;owned\x07"})
        for arguments in (["inspect", path], ["inspect", path, "--json"]):
            self.assertNotIn("\x1b", self.run_program(*arguments, code=OK).stdout)
        self.assertNotIn("\x1b", self.fails(["run", "--input", path, "--output", self.path("o")], INPUT_OUTPUT).stderr)
        names = {name: ("F32", [1], b"1234") for name in ("extra\x1b[31m\n", "C1 \x9b31m", "ä")}
        shown = self.run_program("run", "--input", self.write("more", {**safetensors_file.qkv(8, 2, 4), **names}), "--output", self.path("o")).stdout
        for note in ("tensor extra?[31m? is not read", "tensor C1 ??31m is not read", "tensor ä is not read"):
            self.assertIn(note + "\n", shown)
        documents = self.write("documents", {"cu_seqlens\x1b": ("I32", [2], safetensors_file.encode([0, 8], "I32"))})
        self.assertIn("cu_seqlens?: 1 document of", self.run_program("inspect", documents).stdout)

    def test_shapes_and_dtypes(self):
        good = safetensors_file.qkv(8, 2, 4)
        normal = safetensors_file.normal
        for change, words in [
            ({"q": normal((8, 2, 4), 1)}, "q has shape (8, 2, 4), expected 4 dimensions: (batch, tokens, heads, head_dim)"),
            ({"q": ("I32", [1, 8, 2, 4], b"\0" * 256)}, "q has dtype I32, expected F32, BF16 or F16"),
            ({"k": normal((1, 8, 2, 4), 1, "BF16")}, "k is bfloat16, but q is float32"),
            ({"k": normal((2, 8, 2, 4), 1)}, "k.batch (2) must equal q.batch (1)"),
            ({"v": normal((1, 9, 2, 4), 1)}, "v.tokens (9) must equal k.tokens (8)"),
            ({"v": normal((1, 8, 1, 4), 1)}, "v.heads (1) must equal k.heads (2)"),
            ({"k": normal((1, 8, 2, 5), 1)}, "k.head_dim (5) must equal q.head_dim (4)"),
            ({name: ("F32", [1, 0, 1 << 32, 4], b"") for name in "qkv"}, "(4294967296) is too large"),
            ({"sinks": normal((3,), 1)}, "sinks has dtype F32 and shape (3), expected F32 and (2)"),
            ({"sinks": normal((2,), 1, "BF16")}, "sinks has dtype BF16"),
            ({"alibi_slopes": normal((2, 2), 1)}, "alibi_slopes has dtype F32 and shape (2, 2), expected F32 and (2) or (1, 2)"),
        ]:
            self.fails_on({**good, **change}, INPUT_OUTPUT, words)
        one_kv = {**good, "k": normal((1, 8, 3, 4), 1), "v": normal((1, 8, 3, 4), 1)}
        self.fails_on(one_kv, ARGUMENTS, "heads (2) must be a multiple of kv_heads (3)")
        self.fails_on({**good, "q": normal((1, 8, 2, 4), 1)}, ARGUMENTS, "layout (bsdh) must be bshd", more=["--layout", "bsdh"])

    def test_paged_keys_are_refused_by_name(self):
        for name in ("block_table", "block_tables", "page_table", "page_indices"):
            tensors = {**safetensors_file.qkv(8, 2, 4), name: ("I32", [1, 2], safetensors_file.encode([1, 0], "I32"))}
            self.fails_on(tensors, UNSUPPORTED, f"in.safetensors: {name}: paged keys and values are not supported")

    def test_documents(self):
        good = safetensors_file.qkv(8, 2, 4)
        for offsets, dtype, code, words in [
            ([0, 5, 3, 8], "I32", ARGUMENTS, "cu_seqlens_q must ascend"),
            ([1, 8], "I32", ARGUMENTS, "cu_seqlens_q[0] (1) must be 0"),
            ([0, 9], "I32", ARGUMENTS, "cu_seqlens_q must end at tokens_q (8), not at 9"),
            ([0, 8], "F32", INPUT_OUTPUT, "cu_seqlens has dtype F32 and shape (2), expected I32 and one dimension"),
        ]:
            tensors = {**good, "cu_seqlens": (dtype, [len(offsets)], safetensors_file.encode(offsets, dtype))}
            self.fails_on(tensors, code, words, more=["--pattern", "documents"])
        offsets = ("I32", [2], safetensors_file.encode([0, 8], "I32"))
        self.fails_on({**good, "cu_seqlens": offsets, "cu_seqlens_q": offsets}, INPUT_OUTPUT, "which one holds is unclear", more=["--pattern", "documents"])
        self.fails_on({**good, "cu_seqlens_q": offsets}, INPUT_OUTPUT, "has no tensor 'cu_seqlens_k'", more=["--pattern", "documents"])

    def test_gradients(self):
        good = safetensors_file.qkv(8, 2, 4)
        normal = safetensors_file.normal
        for tensors, words in [
            ({"x": normal((1, 8, 2, 4), 1)}, "has no tensor 'd_out'"),
            ({"d_out": normal((1, 9, 2, 4), 1)}, "d_out has batch 1, tokens 9, heads 2, head_dim 4; o has 1, 8, 2, 4"),
            ({"do": normal((1, 8, 2, 4), 1), "d_out": normal((1, 8, 2, 4), 2)}, "has d_out and also do: which one holds is unclear"),
            ({"do": normal((1, 8, 2, 4), 1, "F16")}, "do is float16, but q is float32"),
            ({"d_out": normal((1, 8, 2, 4), 1), "dlse": normal((1, 2, 9), 1)}, "dlse has batch 1, heads 2, tokens 9; lse has 1, 2, 8"),
            ({"d_out": normal((1, 8, 2, 4), 1), "dlse": normal((1, 2, 8), 1, "BF16")}, "dlse has dtype BF16, expected F32"),
            ({"d_out": normal((1, 8, 2, 4), 1), "dlse": normal((2, 8), 1)}, "dlse has shape (2, 8), expected 3 dimensions: (batch, heads, tokens)"),
        ]:
            self.fails_on(good, INPUT_OUTPUT, words, more=["--grad", self.write("grad.safetensors", tensors)])
        swapped = self.write("swapped.safetensors", {"d_out": normal((1, 2, 8, 4), 1)}, {"layout": "bhsd"})
        self.fails_on(good, INPUT_OUTPUT, "is bhsd by its metadata, but the input is bshd", more=["--grad", swapped])
        self.fails_on(good, ARGUMENTS, "--grad (random) must be a file, random:SEED or ones", more=["--grad", "random"])
        self.fails_on(good, ARGUMENTS, "--grad random:SEED (x) must be a whole number", more=["--grad", "random:x"])

    def test_what_the_system_refuses(self):
        def limited(what, limit):
            return lambda: resource.setrlimit(what, (limit, limit))

        common = ["run", "--input", self.write("in.safetensors", safetensors_file.qkv(64, 2, 4)), "--output", self.path("out")]
        # SIGXFSZ stays ignored as in Python: what does not fit is an error of the call.
        result = self.run_program(*common, code=INPUT_OUTPUT, preexec_fn=limited(resource.RLIMIT_FSIZE, 1000), restore_signals=False)
        self.assertIn(" bytes large: File too large", result.stderr)
        small = limited(resource.RLIMIT_AS, 400 << 20)
        for arguments in (["verify", "nq=200000 h=8 d=64 pattern=window:1,0"], ["bench", "--tokens", 400000, "--pattern", "window:1,0"]):
            result = self.run_program(*arguments, code=MEMORY, preexec_fn=small)
            self.assertIn("out of memory: a rank takes less with more ranks", result.stderr)
        few = limited(resource.RLIMIT_NOFILE, 100)
        for more in (["--ranks", 16], ["--ranks", 2, "--compare", 16]):  # the same transport for both
            result = self.run_program(*common, *more, "--transport", "processes", code=INPUT_OUTPUT, preexec_fn=few)
            self.assertIn("16 forked ranks need 560 file descriptors, the limit is 100", result.stderr)

        def stacks():  # each thread's takes most of what there is
            resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, 1 << 30))
            resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))

        result = self.run_program(*common, "--ranks", 3, code=INPUT_OUTPUT, preexec_fn=stacks)
        self.assertIn("error: no thread for rank 1/3: Resource temporarily unavailable", result.stderr)
        result = self.run_program(*common, "--threads", 3, code=INPUT_OUTPUT, preexec_fn=stacks)
        self.assertIn("Resource temporarily unavailable", result.stderr)
        self.assertNotIn("standard output", result.stderr)
        self.assertEqual(os.listdir(self.folder), ["in.safetensors"])

    def test_options_of_run(self):
        good = safetensors_file.qkv(8, 2, 4)
        self.fails_on(good, ARGUMENTS, "--transport (pigeons) must be threads or processes", more=["--transport", "pigeons"])
        self.fails_on(good, ARGUMENTS, "--deadline (-1) must be positive", more=["--deadline=-1"])
        self.fails_on(good, ARGUMENTS, "--compare (0) must be in [1, ", more=["--compare", 0])
        self.fails_on(good, ARGUMENTS, "--sequential and --transport exclude each other", more=["--sequential", "--transport", "threads"])
        self.fails_on(good, MEMORY, "no plan fits memory_budget (64 bytes)", more=["--memory", 64])
        self.fails_on(good, ARGUMENTS, "--sequential and --compare exclude each other", more=["--sequential", "--compare", 1])
        self.fails_on(good, ARGUMENTS, "--backward-tile is given, but there is no backward pass", more=["--backward-tile", "7x7"])
        self.fails(["plan", "--tokens", 5000, "--draw", "text"], ARGUMENTS, "512")
        source = self.path("in.safetensors")
        for option in (["--tokens", 8], ["--tokens-k", 8], ["--batch", 1], ["--heads", 2], ["--kv-heads", 2], ["--head-dim", 4], ["--head-dim-v", 4],
                       ["--dtype", "f32"], ["--cu-seqlens", "0,8"], ["--cu-seqlens-k", "0,8"], ["--alibi"], ["--sinks"]):  # fmt: skip
            self.fails(["plan", "--input", source, "--pattern", "documents", *option], ARGUMENTS, f"{option[0]} and --input exclude each other")

    def test_layouts_that_are_not_known(self):
        good = safetensors_file.qkv(8, 2, 4)
        source = self.write("in.safetensors", good, {"layout": "weird"})
        run = ["run", "--input", source, "--output", self.path("o")]
        self.fails(run, INPUT_OUTPUT, source, "the layout of its metadata (weird) must be bshd")
        self.fails(["plan", "--input", source], INPUT_OUTPUT, "(weird)")
        self.run_program(*run, "--layout", "bshd")

    def test_files_that_are_the_same(self):
        source = self.write("in.safetensors", safetensors_file.qkv(8, 2, 4))
        gradient = self.write("grad.safetensors", {"d_out": safetensors_file.normal((1, 8, 2, 4), 1)})
        before = {name: pathlib.Path(self.path(name)).read_bytes() for name in os.listdir(self.folder)}
        link, output = self.path("link"), self.path("o")
        os.symlink(source, link)
        run = ["run", "--input", source]
        for arguments, first, second in [
            ([*run, "--output", source], "--input", "--output"),
            ([*run, "--output", link], "--input", "--output"),
            ([*run, "--output", output, "--json", source], "--input", "--json"),
            ([*run, "--output", output, "--json", output], "--output", "--json"),
            ([*run, "--output", output, "--json", self.path("../" + os.path.basename(self.folder) + "/o")], "--output", "--json"),
            ([*run, "--output", gradient, "--grad", gradient], "--output", "--grad"),
            (["plan", "--input", source, "--draw", "svg:" + source], "--draw", "--input"),
        ]:
            self.fails(arguments, ARGUMENTS, f"{first} and {second} are the same file (")
        environment = {**os.environ, "RINGSPAN_TUNE_FILE": self.path("tune.json")}
        error = self.run_program(*run, "--output", self.path("tune.json"), code=ARGUMENTS, env=environment).stderr
        self.assertIn("--output and the tune file are the same file", error)
        with open(output, "wb") as stdout:
            error = subprocess.run([PROGRAM, *run, "--output", output], stdout=stdout, stderr=subprocess.PIPE, text=True, check=False).stderr
        self.assertIn("--output and standard output are the same file", error)
        os.unlink(output)
        self.run_program(*run, "--output", output, "--grad", "ones")
        for name, content in before.items():
            self.assertEqual(pathlib.Path(self.path(name)).read_bytes(), content, name)

    def test_what_cannot_be_written_is_known_before_the_work(self):
        source = self.write("in.safetensors", safetensors_file.qkv(8, 2, 4))
        pipe, folder, link, used = (self.path(name) for name in ("pipe", "folder", "link", "used"))
        os.mkfifo(pipe)
        os.mkdir(folder)
        os.symlink(pipe, link)
        before = sorted(os.listdir(self.folder))
        for path, words in [
            (pipe, "is not a regular file"), (link, "is not a regular file"), (folder, "is not a regular file"), (folder + "/", "is not a regular file"),
            (self.path("new/"), "is not the name of a file"), (self.path("no/file"), "cannot be created: No such file or directory"),
            (source + "/file", "cannot be created: Not a directory"),
        ]:  # fmt: skip
            self.fails(["run", "--input", source, "--output", path], INPUT_OUTPUT, path, words)
            self.fails(["run", "--input", source, "--output", used, "--json", path], INPUT_OUTPUT, path, words)
            self.fails(["plan", "--tokens", 8, "--draw", "svg:" + path], INPUT_OUTPUT, path, words)
        self.fails(["run", "--input", source, "--output", ""], INPUT_OUTPUT, "'': is not the name of a file")
        self.assertEqual(sorted(os.listdir(self.folder)), before)
        self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))

    def test_files_that_do_not_fit_leave_what_was_there(self):
        path = self.path("picture.svg")
        with open(path, "w", encoding="utf-8") as file:
            file.write("before")
        small = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # noqa: E731
        arguments = ["plan", "--tokens", 8, "--draw", "svg:" + path]
        result = self.run_program(*arguments, code=INPUT_OUTPUT, preexec_fn=small, restore_signals=False)
        self.assertIn(f"{path}: cannot be written: File too large", result.stderr)
        with open(path, encoding="utf-8") as file:
            self.assertEqual(file.read(), "before")
        self.assertEqual(os.listdir(self.folder), ["picture.svg"])


if __name__ == "__main__":
    unittest.main()
