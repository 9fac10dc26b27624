"""`ringspan run --sequential`: the results of parallel ranks in the memory of one."""

import unittest

import safetensors_file
from program import UNSUPPORTED, ProgramTest


class Sequential(ProgramTest):
    def run_both(self, tensors, *arguments):
        source = self.write("in.safetensors", tensors)
        common = ["run", "--input", source, "--strategy", "exchange", "--verify", *arguments]
        self.run_program(*common, "--output", self.path("parallel.safetensors"))
        self.run_program(*common, "--output", self.path("sequential.safetensors"), "--sequential")
        return safetensors_file.read(self.path("sequential.safetensors"))[0], safetensors_file.read(self.path("parallel.safetensors"))[0]

    def test_results_are_those_of_parallel_ranks(self):
        # o, lse and dq are computed by the same program on the same rows: the same bits. dk and dv are summed in another order.
        cases = [
            ("causal", "F32", "zigzag", "auto"),
            ("causal", "BF16", "contiguous", "5"),
            ("dilated:16x1,32x2@torchscale", "F16", "striped", "none"),
            ("window:6,3", "BF16", "block_striped:4", "7"),
        ]
        for pattern, dtype, sharding, bucket in cases:
            tensors = safetensors_file.qkv(67, 4, 8, kv_heads=2, head_dim_v=12, batch=2, dtype=dtype)
            arguments = ["--pattern", pattern, "--sharding", sharding, "--bucket", bucket, "--ranks", 4, "--grad", "random:1", "--threads", 1]
            found, expected = self.run_both(tensors, *arguments)
            for name in ("o", "lse", "dq"):
                self.assertEqual(found[name], expected[name], f"{pattern} {dtype}: {name}")
            tolerance = {"F32": 2e-6, "BF16": 8e-3, "F16": 1e-3}[dtype]  # one rounding step
            for name in ("dk", "dv"):
                values = [safetensors_file.decode(tensor[name][2], dtype) for tensor in (found, expected)]
                self.assert_close(*values, tolerance, f"{pattern} {dtype}: {name}")

    def test_forward_alone_one_rank_and_more_ranks_than_tokens(self):
        for ranks, tokens in ((1, 20), (3, 20), (7, 4)):
            found, expected = self.run_both(safetensors_file.qkv(tokens, 2, 4), "--ranks", ranks, "--threads", 1)
            self.assertEqual(found, expected, (ranks, tokens))

    def test_sink_gradients_have_the_same_bits(self):
        tensors = safetensors_file.qkv(40, 4, 8)
        tensors["sinks"] = safetensors_file.normal([4], 3)
        found, expected = self.run_both(tensors, "--ranks", 3, "--grad", "random:5", "--threads", 1)
        self.assertEqual(found["dsinks"], expected["dsinks"])

    def test_layout_bhsd(self):
        tensors = {name: (dtype, [1, 4, 24, 8], payload) for name, (dtype, _, payload) in safetensors_file.qkv(24, 4, 8, dtype="BF16").items()}
        found, expected = self.run_both(tensors, "--layout", "bhsd", "--ranks", 3, "--grad", "random:5", "--threads", 1, "--pattern", "causal")
        self.assertEqual(found["o"], expected["o"])
        values = [safetensors_file.decode(tensor["dk"][2], "BF16") for tensor in (found, expected)]
        self.assert_close(*values, 8e-3, "dk")

    def test_memory_is_that_of_one_rank_and_falls_with_the_ranks(self):
        tokens, heads, dim = 32768, 4, 64
        source = self.write("in.safetensors", {name: safetensors_file.tiled((1, tokens, heads, dim), seed) for seed, name in enumerate("qkv")})
        peaks = []
        for ranks in (1, 2, 4):
            report = self.run_json(
                "run", "--input", source, "--output", self.path("out.safetensors"), "--sequential", "--strategy", "exchange",
                "--pattern", "dilated:512x1,1024x2 & causal", "--ranks", ranks, "--grad", "ones",
            )["sequential"]  # fmt: skip
            peak, forecast = report["peak_resident_bytes"], report["forecast_bytes"]
            self.assertLess(abs(peak - forecast), 0.10 * forecast, f"{ranks} ranks: {peak} bytes, forecast {forecast}")
            peaks.append(peak)
        self.assertLess(peaks[1], 0.6 * peaks[0])
        self.assertLess(peaks[2], 0.6 * peaks[1])

    def test_memory_counts_the_gradient_of_lse(self):
        tokens, heads, dim = 131072, 16, 2
        source = self.write("in.safetensors", {name: safetensors_file.tiled((1, tokens, heads, dim), seed) for seed, name in enumerate("qkv")})
        gradient = {"d_out": safetensors_file.tiled((1, tokens, heads, dim), 4)}
        reports = []
        for more in ({}, {"dlse": safetensors_file.tiled((1, heads, tokens), 5)}):
            reports.append(self.run_json(
                "run", "--input", source, "--output", self.path("out.safetensors"), "--sequential", "--strategy", "exchange",
                "--pattern", "dilated:32x1", "--grad", self.write("grad.safetensors", {**gradient, **more}),
            )["sequential"])  # fmt: skip
        of_dlse = 4 * tokens * heads
        self.assertEqual(reports[1]["forecast_bytes"] - reports[0]["forecast_bytes"], of_dlse)
        measured = reports[1]["peak_resident_bytes"] - reports[0]["peak_resident_bytes"]
        self.assertLess(abs(measured - of_dlse), 0.25 * of_dlse, measured)

    def test_what_it_cannot_do_is_refused_by_name(self):
        source = self.write("in.safetensors", safetensors_file.qkv(8, 2, 4))
        common = ["run", "--input", source, "--output", self.path("out.safetensors"), "--ranks", 2, "--sequential"]
        result = self.run_program(*common, "--strategy", "ring", code=UNSUPPORTED)
        self.assertIn("run --sequential needs --strategy exchange", result.stderr)
        self.assertIn("this plan is ring", result.stderr)
        result = self.run_program(*common, "--strategy", "exchange", "--replicated-q", code=UNSUPPORTED)
        self.assertIn("needs sharded queries", result.stderr)


if __name__ == "__main__":
    unittest.main()
