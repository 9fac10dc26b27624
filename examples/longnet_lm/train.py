"""One rank of the demonstration; ./run starts it with torchrun. Parts: parity, length, memory."""

import argparse
import ctypes
import json
import pathlib
import time

import model as lm
import text as texts
import torch
import torch.distributed as dist
from tqdm import tqdm

from ringspan.torch import Sharding

RATE, TABLE_RATE, WARM_UP = 2e-3, 2e-2, 2  # of the layers; of the embedding and the head, which see little of each byte
PARITY_CONTEXT = 4096
LEAST_STEPS = 10  # of the long training, however slow the machine: fewer may not learn what is to be shown


def status(field):
    """A field of /proc/self/status in MiB."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":"))


def keep_freed_memory(keep):
    """glibc's malloc: freed tensors stay with the process, which is fast, or go back to the system, so that the peak is what was in
    use and not what lay between."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-3, (32 if keep else 1) << 20)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, (512 if keep else 1) << 20)  # M_TRIM_THRESHOLD
        libc.malloc_trim(0)


class Trainer:
    """A model and its optimizer on one rank of a group, or on one rank alone (group=None: then nothing here is distributed)."""

    def __init__(self, context, group):
        self.group = group
        self.rank, ranks = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
        self.sharding = Sharding("zigzag", tokens=context, ranks=ranks)
        self.positions = self.sharding.positions(self.rank)
        self.model = lm.build(context, group, self.sharding)
        tables = [*self.model.embedding.parameters(), *self.model.head.parameters()]
        layers = [*self.model.blocks.parameters(), *self.model.norm.parameters()]
        groups = [{"params": layers, "rate": RATE}, {"params": tables, "rate": TABLE_RATE}]
        self.optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
        self.steps = 0

    def loss(self, window):
        """The mean over all tokens of all ranks; the gradient that it gives a rank is the one of the rank's own tokens."""
        tokens = self.sharding.shard(window, rank=self.rank)
        labels = self.sharding.next_labels(window, rank=self.rank)
        losses = self.model(tokens, labels, self.positions)
        if self.group is not None:
            return self.sharding.mean_loss(losses, labels=labels, group=self.group)
        return losses.sum() / (labels >= 0).sum()

    def step(self, window, progress=0.0):
        """One step; `progress` from 0 to 1 lowers the rate."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["rate"] * min(1.0, (self.steps + 1) / WARM_UP) * (1.0 - 0.95 * progress)
        self.optimizer.zero_grad()
        loss = self.loss(window)
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        if self.group is not None:  # the weights' gradients: a plain sum over the ranks
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat, group=self.group)
            for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
                gradient.copy_(part.view_as(gradient))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.steps += 1
        return loss.item()

    @torch.no_grad()
    def evaluate(self, window):
        return self.loss(window).item()


def parity(arguments, text, group, quiet):
    trainer = Trainer(PARITY_CONTEXT, group)
    ranks = trainer.sharding.ranks
    bar = tqdm(range(arguments.parity_steps), f"  {ranks} rank{'s' * (ranks > 1)}", disable=quiet, mininterval=0.5)
    begin, losses = time.monotonic(), []
    for step in bar:
        losses.append(trainer.step(text.window(step, PARITY_CONTEXT, seed=1), step / len(bar)))
        bar.set_postfix(loss=f"{losses[-1]:.6f}", refresh=False)
    bar.close()
    return {"losses": losses, "seconds": time.monotonic() - begin}


def print_parity(one, two):
    """The losses of two runs of parity(), side by side."""
    print(f"\n  {'step':>6} {'1 rank':>12} {'2 ranks':>12} {'difference':>12}")
    steps = len(one["losses"])
    for step in sorted({0, *range(9, steps, 10), steps - 1}):
        a, b = one["losses"][step], two["losses"][step]
        print(f"  {step + 1:6d} {a:12.6f} {b:12.6f} {abs(a - b):12.1e}")
    gap = max(abs(a - b) for a, b in zip(one["losses"], two["losses"]))
    print(f"  largest difference {gap:.1e}; {one['seconds']:.1f} s on 1 rank, {two['seconds']:.1f} s on 2\n", flush=True)


def memory(arguments, text, group, base):
    """The peak of one training step above what the process held before it had a model."""
    keep_freed_memory(False)
    Trainer(arguments.context, group).step(text.window(0, arguments.context))
    return status("VmHWM") - base


def length(arguments, text, group, quiet, base):
    trainer = Trainer(arguments.context, group)
    held_out = text.held_out_window(arguments.context)
    keep_freed_memory(False)  # while the first step is measured
    bar = tqdm(total=arguments.seconds, desc="  training", disable=quiet,
               bar_format="{desc}: {percentage:3.0f}%|{bar:24}| {n:.0f}/{total:.0f} s{postfix}")  # fmt: skip
    result = {"losses": [], "seconds": [], "held_out": [(0, trainer.evaluate(held_out))]}
    trained = 0.0
    begin = evaluated = time.monotonic()
    while True:
        clock = torch.tensor([time.monotonic() - begin, time.monotonic() - evaluated], dtype=torch.float64)
        if group is not None:
            dist.broadcast(clock, src=0, group=group)  # all ranks go by the clock of rank 0
        now, since = clock.tolist()
        bar.update(min(now, arguments.seconds) - bar.n)
        if now >= arguments.seconds and trainer.steps >= LEAST_STEPS:
            break
        if since > arguments.seconds / 4 and now < 0.9 * arguments.seconds:
            result["held_out"].append((trainer.steps, trainer.evaluate(held_out)))
            evaluated = time.monotonic()
        start = time.monotonic()
        progress = min(now / arguments.seconds, trainer.steps / LEAST_STEPS)
        result["losses"].append(trainer.step(text.window(trainer.steps, arguments.context), progress))
        trained += time.monotonic() - start
        result["seconds"].append(time.monotonic() - begin)
        if trainer.steps == 1:
            result["memory"] = status("VmHWM") - base
            keep_freed_memory(True)
        bar.set_postfix_str(f"step {trainer.steps}, loss {result['losses'][-1]:.3f}, held out {result['held_out'][-1][1]:.3f}, "
                            f"{trainer.steps * arguments.context / trained:,.0f} tokens/s")  # fmt: skip
    bar.close()
    result["held_out"].append((trainer.steps, trainer.evaluate(held_out)))
    result["tokens_per_second"] = trainer.steps * arguments.context / trained
    result["parameters"] = lm.parameters_of(trainer.model)
    return result


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", required=True)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    parser.add_argument("--compare", type=pathlib.Path, help="output of another number of ranks, to print parity with it")
    parser.add_argument("--text", type=pathlib.Path)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--parity-steps", type=int, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD if ranks > 1 else None
    text = texts.load(arguments.text, least=arguments.context)
    Trainer(1024, group).step(text.window(0, 1024))  # so that the libraries' code is in memory before it is measured
    base, result = status("VmRSS"), {}
    parts = arguments.parts.split(",")
    if "parity" in parts:
        result["parity"] = parity(arguments, text, group, quiet=rank > 0)
        if arguments.compare and rank == 0:
            print_parity(json.loads(arguments.compare.read_text())["parity"], result["parity"])
    if "length" in parts:
        if rank == 0:
            print(f"2. length: {arguments.context:,} tokens in one context over {ranks} ranks, {arguments.seconds:.0f} s\n"
                  f"   branches {lm.branches(arguments.context)}", flush=True)  # fmt: skip
        result["length"] = length(arguments, text, group, rank > 0, base)
        result["memory"] = result["length"].pop("memory")
    if "memory" in parts:
        result["memory"] = memory(arguments, text, group, base)
    used = torch.tensor([result["memory"]])
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    result["memory"] = used.item()
    if rank == 0:
        arguments.output.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
