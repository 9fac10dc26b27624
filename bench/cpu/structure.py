"""What structure costs: the rate of masks, short queries and threads, relative to the dense rate or to reading memory."""

import math
import random
import sys
import time

import torch

from ringspan_c import Attention


def best_seconds(call, clock, repeats):
    now = time.process_time if clock == "cpu" else time.perf_counter
    call()
    times = []
    for _ in range(repeats):
        begin = now()
        call()
        times.append(now() - begin)
    return sorted(times)[len(times) // 2]


class Structures:
    """Each method returns seconds per visible pair and query head."""

    def __init__(self, library, dtype, head_dim, clock, repeats, heads=2):
        self.library, self.dtype, self.head_dim = library, getattr(torch, dtype), head_dim
        self.clock, self.repeats, self.heads = clock, repeats, heads

    def seconds(self, pattern, tokens, threads=1, documents=None, tokens_q=None, heads=None, kv_heads=None):
        heads = heads or self.heads
        make = lambda n, h: torch.randn(1, n, h, self.head_dim, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        q, k, v = make(tokens_q or tokens, heads), make(tokens, kv_heads or heads), make(tokens, kv_heads or heads)
        attention = Attention(self.library, q, k, v, pattern, threads, False, documents=documents)
        return best_seconds(attention.forward, self.clock, self.repeats) / heads

    def full(self, tokens):
        return self.seconds("full", tokens) / tokens**2

    def causal(self, tokens):
        return self.seconds("causal", tokens) / (tokens * (tokens + 1) / 2)

    def window(self, tokens, left):
        pairs = sum(min(i, left) + 1 for i in range(tokens))
        return self.seconds(f"window:{left},0", tokens) / pairs

    def dilated(self, tokens, rate):
        return self.seconds(f"dilated:{tokens}x{rate}", tokens) / (tokens // rate) ** 2

    def documents(self, count):
        generator = random.Random(1)
        ends = [0]
        for _ in range(count):
            ends.append(ends[-1] + round(math.exp(generator.uniform(math.log(16), math.log(4096)))))
        pairs = sum((b - a) ** 2 for a, b in zip(ends, ends[1:]))
        return self.seconds("documents", ends[-1], documents=ends, heads=1) / pairs

    def decode_bytes_per_second(self, tokens_q, tokens_k=131072, group=8):
        seconds = self.seconds("full", tokens_k, tokens_q=tokens_q, heads=group, kv_heads=1) * group
        return 2 * tokens_k * self.head_dim * self.dtype.itemsize / seconds


def run_structures(library, dtype, head_dim, clock, repeats, peaks):
    """Rows of points 3 to 5, printed as they come; ratios with their floors."""
    s = Structures(library, dtype, head_dim, clock, repeats)
    rows = []

    def row(name, ratio, floor):
        rows.append({"name": name, "dtype": dtype, "head_dim": head_dim, "ratio": ratio, "floor": floor})
        print(f"{name:56}{dtype:10}{ratio:7.2f}  floor {floor:.2f}{'' if ratio >= floor else '  below'}", file=sys.stderr, flush=True)

    dense = s.full(4096)
    row("causal / full, n 8,192", s.full(8192) / s.causal(8192), 0.9)
    row("dilated x4 of 16,384 / dense", dense / s.dilated(16384, 4), 0.9)
    row("window 511, n 32,768 / dense", dense / s.window(32768, 511), 0.75)
    row("200 documents of 16 to 4,096 / dense", dense / s.documents(200), 0.8)
    for tokens_q in (1, 4, 16):
        bandwidth = s.decode_bytes_per_second(tokens_q) / 1e9
        row(f"{tokens_q} queries, 131,072 keys, 8 heads: read bandwidth", bandwidth / peaks.get("read_gbytes_per_second", math.inf), 0.8)
    return rows
