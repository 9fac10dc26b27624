"""Checks ringspan where it is installed: do the ranks reach each other, are results right, how precise, how fast.

    torchrun --nproc-per-node=4 -m ringspan.selftest [communication|basic|precision|performance] ...

Without a name all four run. --device cuda computes on each process's GPU, LOCAL_RANK. Needs no GPU otherwise, and no data; over several machines start it as any torchrun job. Exits with 1 where a
check failed, on every rank.
"""

import argparse
import math
import os
import sys
import time

import torch
import torch.distributed as dist

import ringspan
import ringspan.torch as rt
from ringspan import _core
from ringspan.torch import _group

PARTS = ("communication", "basic", "precision", "performance")
STRATEGIES = ("ring", "exchange", "all-gather", "ulysses", "pass-q", "local")


class Selftest:
    def __init__(self, group, deadline, device="cpu"):
        self.group, self.deadline, self.device = group, deadline, device
        self.memory = "cpu" if device == "cuda-emulated" else device  # where tensors lie
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.failures = []

    def say(self, text=""):
        if self.rank == 0:
            print(text, flush=True)

    def worst(self, value):
        """The largest of a number over the ranks."""
        t = torch.tensor(float(value), dtype=torch.float64, device="cpu")
        dist.all_reduce(t, dist.ReduceOp.MAX, group=self.group)
        return t.item()

    def check(self, name, value, bound, unit=""):
        worst = self.worst(value if value == value else math.inf)
        ok = worst <= bound
        if not ok:
            self.failures.append(name)
        self.say(f"  {'ok    ' if ok else 'FAILED'} {name:<44} {worst:9.3g}{unit} (at most {bound:.3g}{unit})")

    def finish(self):
        if self.memory.startswith("cuda"):
            torch.cuda.synchronize(self.memory)

    # ---- parts

    def communication(self):
        """Every pair of ranks, small and large messages: the bytes that were sent arrive."""
        core = _group.communicator_of(self.group)
        if self.ranks == 1:
            self.say("  one rank: nobody to talk to")
            return
        self.say(f"  {'pair':>9} {'latency':>12} {'bandwidth':>14}")
        turn = 0
        for a in range(self.ranks):
            for b in range(a + 1, self.ranks):
                figures = [math.inf, 0.0]
                wrong = 0
                for size, repeats in ((64, 20), (4 << 20, 3)):
                    out = torch.full((size,), (self.rank * 7 + size) % 251, dtype=torch.uint8, device="cpu")
                    into = torch.empty(size, dtype=torch.uint8, device="cpu")
                    for _ in range(repeats):
                        turn += 1
                        if self.rank not in (a, b):
                            continue
                        peer = a + b - self.rank
                        into.zero_()
                        begin = time.perf_counter()
                        core.exchange(turn, [(True, peer, out.data_ptr(), size), (False, peer, into.data_ptr(), size)], self.deadline)
                        seconds = time.perf_counter() - begin
                        wrong += int((into != (peer * 7 + size) % 251).sum())
                        if size == 64:
                            figures[0] = min(figures[0], seconds)
                        else:
                            figures[1] = max(figures[1], 2 * size / seconds)
                latency = -self.worst(-(figures[0] if self.rank in (a, b) else math.inf))
                bandwidth = self.worst(figures[1])
                self.say(f"  {a:>4}-{b:<4} {latency * 1e6:9.0f} us {bandwidth / 1e9:9.2f} GB/s")
                if self.worst(wrong) > 0:
                    self.failures.append(f"bytes between ranks {a} and {b}")
                    self.say(f"  FAILED: bytes between ranks {a} and {b} differ")

    def _tensors(self, n, heads, kv_heads, dim, dtype):
        generator = torch.Generator().manual_seed(n)
        shapes = (1, n, heads, dim), (1, n, kv_heads, dim), (1, n, kv_heads, dim), (1, n, heads, dim)
        return [torch.randn(shape, generator=generator).to(self.memory, dtype) for shape in shapes]

    def _errors(self, n, dtype, kind="zigzag", **options):
        """The largest errors of o, dq, dk, dv on this rank against dense attention in float64."""
        q, k, v, d_out = self._tensors(n, 4, 2, 32, dtype)
        sharding = rt.Sharding(kind, tokens=n, ranks=self.ranks)
        local = [sharding.shard(t, rank=self.rank).requires_grad_() for t in (q, k, v)]
        o = rt.attention(*local, causal=True, group=self.group, sharding=kind, deadline=self.deadline, device=self.device, **options)
        o.backward(sharding.shard(d_out, rank=self.rank))
        whole = [t.double().requires_grad_() for t in (q, k, v)]
        keys, values = (t.repeat_interleave(2, 2).transpose(1, 2) for t in whole[1:])
        expected = torch.nn.functional.scaled_dot_product_attention(whole[0].transpose(1, 2), keys, values, is_causal=True).transpose(1, 2)
        expected.backward(d_out.double())
        pairs = [(o, expected), *((a.grad, b.grad) for a, b in zip(local, whole))]
        return [(a.double() - sharding.shard(b.detach(), rank=self.rank)).abs().max().item() if a.numel() else 0.0 for a, b in pairs]

    def basic(self):
        """Every strategy and sharding, forward and backward, in float32."""
        for strategy in STRATEGIES:
            self.check(f"{strategy}, zigzag", max(self._errors(97, torch.float32, strategy=strategy)), 2e-5)
        for kind in ("contiguous", "striped", "block_striped:8"):
            self.check(f"ring, {kind}", max(self._errors(97, torch.float32, kind, strategy="ring")), 2e-5)

    def precision(self):
        """The largest error against float64, in each storage type."""
        for dtype, bound in ((torch.float32, 2e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)):
            errors = self._errors(512, dtype, strategy="ring")
            for name, error in zip(("o", "dq", "dk", "dv"), errors):
                self.check(f"{str(dtype).removeprefix('torch.')}, {name}", error, bound)

    def performance(self):
        """Causal attention over all ranks against this rank alone, with the same threads per rank."""
        threads = rt.num_threads()
        self.say(f"  {'tokens':>7} {'one rank':>11} {'all ranks':>11} {'speed-up':>9}   forward + backward, 8 heads of 64, {threads} threads per rank")
        for n in (1024, 2048, 4096):
            q, k, v, d_out = self._tensors(n, 8, 8, 64, torch.float32)
            sharding = rt.Sharding("zigzag", tokens=n, ranks=self.ranks)

            def step(tensors, gradient, **options):
                tensors = [t.requires_grad_() for t in tensors]
                self.finish()
                begin = time.perf_counter()
                rt.attention(*tensors, causal=True, device=self.device, **options).backward(gradient)
                self.finish()
                return time.perf_counter() - begin

            local = [sharding.shard(t, rank=self.rank) for t in (q, k, v)]
            gradient = sharding.shard(d_out, rank=self.rank)
            alone, together = math.inf, math.inf
            for _ in range(3):
                if self.rank == 0:  # the others are idle meanwhile
                    alone = min(alone, step([q, k, v], d_out))
                dist.barrier(group=self.group)
                together = min(together, self.worst(step(local, gradient, group=self.group, deadline=self.deadline)))
            self.say(f"  {n:>7} {alone:>9.3f} s {together:>9.3f} s {alone / together:>8.2f}x")


def parse(arguments):
    parser = argparse.ArgumentParser(prog="python -m ringspan.selftest", description=__doc__.split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--backend", help="of torch.distributed (default gloo; with --device cuda cpu:gloo,cuda:nccl)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "cuda-emulated"), help="where attention runs (default %(default)s)")
    parser.add_argument("--deadline", type=float, default=30.0, help="seconds of silence after which a rank is given up (default %(default)s)")
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"unknown part '{part}'; expected {', '.join(PARTS)}")
    return options


def main(arguments=None):
    options = parse(arguments)
    backend, device = options.backend or "gloo", options.device
    if device == "cuda":
        if not torch.cuda.is_available():
            sys.exit("--device cuda: torch sees no CUDA device; of ringspan: " + "; ".join(_core.device_report()))
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', 0)) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
        backend = options.backend or "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    test = Selftest(dist.group.WORLD, options.deadline, device)
    test.say(f"ringspan {ringspan.__version__}, torch {torch.__version__}, {test.ranks} ranks over {backend}, on {device}")
    if "RANK" not in os.environ:
        test.say("one rank only; for more: torchrun --nproc-per-node=4 -m ringspan.selftest")
    for part in options.parts or PARTS:
        test.say(f"\n{part}: {getattr(test, part).__doc__ or ''}".rstrip())
        getattr(test, part)()
    test.say(f"\nFAILED: {', '.join(test.failures)}" if test.failures else "\nall ok")
    dist.barrier()
    dist.destroy_process_group()
    return 1 if test.failures else 0


if __name__ == "__main__":
    sys.exit(main())
