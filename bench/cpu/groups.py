"""The cases of bench/cpu/compare by name, and how long they take."""

import itertools

from turns import MOST_TURNS

DTYPES = ("float32", "bfloat16", "float16")
PASSES = ("forward", "backward")
MASKS = ("full", "causal")

# GFLOP/s of one thread of both sides together, roughly; only for the estimate that is printed first.
RATES = {("forward", "float32"): 50, ("forward", "bfloat16"): 130, ("forward", "float16"): 70,
         ("backward", "float32"): 55, ("backward", "bfloat16"): 90, ("backward", "float16"): 50}

# What the geometric means of the ratios to PyTorch must be at least.
FLOORS = {("forward", "float32"): 1.18, ("forward", "bfloat16"): 2.2, ("forward", "float16"): 1.75,
          ("backward", "float32"): 1.3, ("backward", "bfloat16"): 1.9, ("backward", "float16"): 12.0}


def cases(passes=PASSES, dtypes=DTYPES, masks=MASKS, tokens=(4096,), head_dims=(64, 128), heads=((4, 4),), threads=(1,)):
    return [{"pass": p, "dtype": t, "mask": m, "tokens": n, "head_dim": d, "batch": 1, "heads": h, "kv_heads": h_kv, "threads": c}
            for p, t, m, n, d, (h, h_kv), c in itertools.product(passes, dtypes, masks, tokens, head_dims, heads, threads)]


def in_table_of_peaks(case):
    return (case["mask"] == "full" and case["tokens"] == 4096 and case["threads"] == 1 and case["heads"] == case["kv_heads"]
            and case["dtype"] != "float16")


def long_cases():
    both = cases(tokens=(16384,), heads=((1, 1),))
    return [case for case in both if (case["pass"], case["dtype"]) != ("backward", "float16")]


# `main`, `gqa` and `long` are the table of all; the others show single things. Whole heads keep the time short.
GROUPS = {
    "main": lambda: cases(tokens=(1024,), heads=((8, 8),)) + cases(tokens=(4096,)),
    "gqa": lambda: cases(tokens=(1024,), heads=((8, 2),)) + cases(tokens=(4096,), heads=((4, 1),)),
    "long": long_cases,
    "threads": lambda: cases(dtypes=("float32", "bfloat16"), threads=(2,)),
    "small": lambda: cases(tokens=(128, 512), head_dims=(64,), heads=((8, 8),)) + cases(masks=("full",), tokens=(1024,),
                                                                                        head_dims=(32, 96, 256)),
    "quick": lambda: cases(tokens=(2048,)),
}

# What PyTorch has on a processor without AMX and float16 arithmetic, for which some floors were set. MKL multiplies forward,
# oneDNN backward.
WITHOUT_AMX = {"MKL_ENABLE_INSTRUCTIONS": "AVX512_E3", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
WITHOUT_AMX_ARGUMENTS = ["--tokens", "1024", "--heads", "4", "--dtype", "bfloat16", "float16"]


def flops(case):
    pairs = case["tokens"] ** 2 if case["mask"] == "full" else case["tokens"] * (case["tokens"] + 1) // 2
    products = 2 if case["pass"] == "forward" else 5
    return case["batch"] * case["heads"] * pairs * case["head_dim"] * 2 * products


def minutes(chosen, turns):
    """Of checking and timing; backward runs a forward pass of each first."""
    seconds = 0.0
    for case in chosen:
        work = flops(case) / 1e9
        call = work / RATES[case["pass"], case["dtype"]]
        seconds += call + max(call * turns.repeats, min(call * MOST_TURNS, turns.least_seconds)) + 0.1
        if case["pass"] == "backward":
            seconds += work / 2.5 / RATES["forward", case["dtype"]]
    return seconds / 60
