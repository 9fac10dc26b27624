"""What structure costs: the rate of masks, short queries, threads and ranks, relative to the dense rate, to reading memory or to
PyTorch."""

import ctypes
import dataclasses
import json
import math
import random
import statistics
import struct
import sys
import threading

import torch

import machine
from ringspan_c import Attention, create_threads

KV_GROUP = 8  # query heads per kv head of short queries


def rows_of(tokens, heads, head_dim, dtype):
    return torch.randn(1, tokens, heads, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype)


class Case:
    """A problem of `heads` heads and the work of it: pairs of all heads."""

    def __init__(self, library, dtype, head_dim, pattern, tokens, pairs, heads=2, threads=1, documents=None, backward=False, tensors=None):
        q, k, v = tensors or (rows_of(tokens, heads, head_dim, dtype) for _ in range(3))
        self.attention = Attention(library, q, k, v, pattern, threads, backward, documents=documents)
        self.pairs = pairs * heads
        self.call = self.attention.forward
        if backward:
            self.attention.forward()
            d_out = rows_of(tokens, heads, head_dim, dtype)
            self.call = lambda: self.attention.backward(d_out)


def documents(count):
    generator = random.Random(1)
    ends = [0]
    for _ in range(count):
        ends.append(ends[-1] + round(math.exp(generator.uniform(math.log(16), math.log(4096)))))
    return ends, sum((b - a) ** 2 for a, b in zip(ends, ends[1:]))


def load_packed(path):
    """(q, k, v, ends of documents) of a safetensors file with q, k, v (1, tokens, heads, head_dim) and cu_seqlens."""
    kinds = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "I32": torch.int32}
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])

    def read(name):
        field = header[name]
        begin, end = (8 + length + offset for offset in field["data_offsets"])
        return torch.frombuffer(data[begin:end], dtype=kinds[field["dtype"]]).reshape(field["shape"])

    return (*map(read, "qkv"), read("cu_seqlens").tolist())


class Rows:
    """Prints rows as they come, and keeps them."""

    def __init__(self, dtype, head_dim):
        self.dtype, self.head_dim, self.rows = dtype, head_dim, []

    def add(self, name, ratio, floor=None, **more):
        """`floor`: what is asked for, None where a figure is only reported."""
        self.rows.append({"name": name, "dtype": self.dtype, "head_dim": self.head_dim, "ratio": ratio, "floor": floor, **more})
        extra = "".join(f"  {key} {value:.2f}" for key, value in more.items() if key in ("of_bound", "fastest"))
        asked = "" if floor is None else f"  floor {floor:.2f}{'' if ratio >= floor else '  below'}"
        print(f"{name:56}{self.dtype:10}{ratio:7.2f}{asked}{extra}", file=sys.stderr, flush=True)


def run_masks(library, dtype, head_dim, turns, quick, packed, rows):
    """The rate of pairs relative to dense, both taking turns."""
    make = lambda *case, **more: Case(library, dtype, head_dim, *case, **more)
    beside = lambda case, dense: (lambda t: (case.pairs / t[0]) / (dense.pairs / t[1]))(turns.medians(case.call, dense.call))
    n = 8192
    rows.add("causal / full, n 8,192", beside(make("causal", n, n * (n + 1) / 2), make("full", n, n * n)), 0.9)
    dense = make("full", 4096, 4096**2)
    for rate in (4,) if quick else (2, 4, 8):
        case = make(f"dilated:{4096 * rate}x{rate}", 4096 * rate, 4096**2)
        rows.add(f"dilated x{rate} of {4096 * rate:,} / dense", beside(case, dense), 0.9)
    window = sum(min(i, 511) + 1 for i in range(32768))
    rows.add("window (511, 0), n 32,768 / dense", beside(make("window:511,0", 32768, window), dense), 0.75)
    count = 200 if quick else 1000
    ends, pairs = documents(count)
    case = make("documents", ends[-1], pairs, heads=1, documents=ends)
    rows.add(f"{count:,} documents of 16 to 4,096 / dense", beside(case, make("full", 4096, 4096**2, heads=1)), 0.8)
    if packed:
        *tensors, ends = load_packed(packed)
        tensors = [x.to(dtype) for x in tensors]
        n, heads, width = tensors[0].shape[1:]
        lengths = [b - a for a, b in zip(ends, ends[1:])]
        case = make("documents", n, sum(length**2 for length in lengths), heads=heads, documents=ends, tensors=tensors)
        name = f"{packed.stem}, {len(lengths):,} documents of {min(lengths)} to {max(lengths)}, d = {width} / dense"
        rows.add(name, beside(case, Case(library, dtype, width, "full", 4096, 4096**2)))
    return dense


def run_striped(library, dtype, head_dim, turns, dense, rows):
    """Of the processor time of both ranks: what is shared between them does not matter, waiting neither."""
    n, heads = 8192, 2
    turns = dataclasses.replace(turns, threads=2)
    ranks = ThreadRanks(library, "causal", n, heads, head_dim, 2, dtype, "striped")
    ours, theirs = turns.medians(ranks.forward, dense.call, clock="cpu")
    rows.add("striped over 2 ranks, causal, n 8,192 / dense", (heads * n * (n + 1) / 2 / ours) / (dense.pairs / theirs), 0.9)


def run_short_queries(library, dtype, head_dim, turns, dense, rows):
    """Keys and values read per second relative to a loop of as many threads that only reads, both taking turns; and what arithmetic
    at the dense rate leaves of that: of_bound is relative to the slower of both. The loop also takes keys and values out of the
    caches."""
    tokens, read = 131072, machine.library().read_memory
    pairs_per_second = dense.pairs / turns.medians(dense.call)[0]
    for threads in (1, 2):
        of = dataclasses.replace(turns, repeats=3 * turns.repeats, threads=threads)
        for tokens_q in (1, 4, 16):
            q, k, v = rows_of(tokens_q, KV_GROUP, head_dim, dtype), rows_of(tokens, 1, head_dim, dtype), rows_of(tokens, 1, head_dim, dtype)
            attention = Attention(library, q, k, v, "full", threads, False)
            clock = None if threads == 1 else "wall"  # the processor's counts both
            seconds, reading = of.medians(attention.forward, lambda threads=threads: read(threads), clock=clock)
            read_seconds = reading * 2 * tokens * head_dim * dtype.itemsize / read(threads)
            bound = max(read_seconds, tokens_q * KV_GROUP * tokens / pairs_per_second / threads)
            name = f"{tokens_q} queries, 131,072 keys, 8 heads{'' if threads == 1 else f', {threads} threads'}: read bandwidth"
            rows.add(name, read_seconds / seconds, 0.8, of_bound=bound / seconds,
                     gflops=4 * tokens_q * KV_GROUP * tokens * head_dim / seconds / 1e9,
                     flops_per_byte=2 * tokens_q * KV_GROUP / dtype.itemsize, threads=threads,
                     gbytes_read=2 * tokens * head_dim * dtype.itemsize / read_seconds / 1e9)


def run_threads(library, dtype, head_dim, turns, rows):
    """Two threads against one, wall clock: enough units, and a single one. `fastest` is of the fastest turns."""
    turns = dataclasses.replace(turns, threads=2)
    for name, backward in (("forward", False), ("backward", True)):
        for heads in (4, 1):
            calls = [Case(library, dtype, head_dim, "full", 4096, 4096**2, heads, threads, backward=backward).call for threads in (1, 2)]
            one, two = turns.times(*calls, clock="wall")
            ratio = statistics.median(one) / statistics.median(two)
            rows.add(f"2 threads, {name}, {heads} heads, n 4,096", ratio, 1.9, fastest=min(one) / min(two))


def run_structures(library, dtype, head_dim, turns, quick, packed):
    """Masks, shards, short queries and threads, with what is asked of each."""
    rows = Rows(dtype, head_dim)
    kind = getattr(torch, dtype)
    dense = run_masks(library, kind, head_dim, turns, quick, packed, rows)
    run_striped(library, kind, head_dim, turns, dense, rows)
    run_short_queries(library, kind, head_dim, turns, dense, rows)
    run_threads(library, kind, head_dim, turns, rows)
    return rows.rows


class ThreadRanks:
    """Ranks with one thread each, of one process; q, k and v are dealt in equal numbers of rows."""

    def __init__(self, library, pattern, tokens, heads, head_dim, ranks, dtype, sharding):
        comms = create_threads(ctypes.CDLL(library), ranks)
        self.ranks = [None] * ranks
        self.x = [rows_of(tokens, heads, head_dim, dtype) for _ in range(3)]
        self.pieces = [self.positions(tokens, ranks, rank, sharding) for rank in range(ranks)]

        def make(rank):  # making one agrees with the others
            q, k, v = (x[:, self.pieces[rank]].contiguous() for x in self.x)
            self.ranks[rank] = Attention(library, q, k, v, pattern, 1, False, world=(comms[rank], ranks), sharding=sharding)

        self.on_all(make)

    @staticmethod
    def positions(tokens, ranks, rank, sharding):
        if sharding == "contiguous":
            return torch.arange(tokens).chunk(ranks)[rank]
        if sharding == "striped":
            return torch.arange(rank, tokens, ranks)
        pieces = torch.arange(tokens).chunk(2 * ranks)
        return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])

    def on_all(self, function):
        threads = [threading.Thread(target=function, args=(rank,)) for rank in range(1, len(self.ranks))]
        for thread in threads:
            thread.start()
        function(0)
        for thread in threads:
            thread.join()

    def forward(self):
        self.on_all(lambda rank: self.ranks[rank].forward())

    def output(self):
        o = torch.empty_like(self.x[0])
        for rank, pieces in zip(self.ranks, self.pieces):
            o[:, pieces] = rank.o
        return o


def run_ranks(library, turns):
    """Two ranks with a thread each beside PyTorch with two threads."""
    rows = Rows("float32", 64)
    turns = dataclasses.replace(turns, threads=2)
    torch.set_num_threads(2)
    for pattern in ("full", "causal"):
        ranks = ThreadRanks(library, pattern, 8192, 4, 64, 2, torch.float32, "zigzag" if pattern == "causal" else "contiguous")
        inputs = [x.transpose(1, 2) for x in ranks.x]
        sdpa = lambda: torch.nn.functional.scaled_dot_product_attention(*inputs, is_causal=pattern == "causal")
        ranks.forward()
        difference = (ranks.output() - sdpa().transpose(1, 2)).abs().max().item()
        if not difference < 1e-4:
            raise SystemExit(f"structure: two ranks differ from torch by {difference:.1e}")
        ours, theirs = turns.medians(ranks.forward, sdpa, clock="wall")
        rows.add(f"2 ranks x 1 thread / SDPA, 2 threads, {pattern}, n 8,192", theirs / ours, 1.1)
    torch.set_num_threads(1)
    return rows.rows
