"""One rank of one peer, forked from a process that has loaded torch (group.py), obeys `run`, which sends it dictionaries:

    {"do": "use", "case": …, "oracle": …}  another case with as many ranks
    {"do": "verify", "backward": true}     errors against float64, forward or forward + backward
    {"do": "time", "backward": true}       seconds of one call, and what its threads spent on processors
    {"do": "memory", "backward": true}     how much the peak of resident memory grows in the first call of this size
    {"do": "leak"}                         causal: how much rows change when later keys do
    {"do": "loop"}                         calls until one fails, for ranks that are killed or stopped
"""

import ctypes
import dataclasses
import datetime
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

HERE = Path(__file__).resolve().parent


def resident(field):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


class Rank:
    def __init__(self, setting):
        from cases import Case
        from peers import PEERS

        self.setting, self.case, self.peer = setting, Case.from_json(setting["case"]), PEERS[setting["peer"]]
        self.rank, self.ranks = setting["rank"], setting["ranks"]
        for folder in (self.peer.shim and HERE / "shims" / self.peer.shim, setting["paths"].get(self.peer.path)):
            if folder:
                sys.path.insert(0, str(folder))
        import torch

        torch.set_num_threads(self.case.threads)
        self.module = importlib.import_module(f"adapters.{self.peer.adapter}")
        self.module.Peer.dialect = self.peer.dialect
        self.module.Peer.before_group(self.case)
        if self.ranks > 1:
            import torch.distributed as dist

            limit = {"timeout": datetime.timedelta(seconds=setting["timeout"])} if setting.get("timeout") else {}
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{setting['port']}", rank=self.rank, world_size=self.ranks, **limit)
        self.adapter, self.tensors = None, None

    def use(self, case, oracle):
        from cases import Case

        self.adapter = self.tensors = None
        self.case, self.setting["oracle"] = Case.from_json(case), oracle
        return {}

    def tensors_of(self, adapter, case, change=None):
        """q, k, v and d_out of this rank, in the peer's layout."""
        import torch

        import oracle

        whole = oracle.inputs(case)
        if change:
            change(whole)
        positions = adapter.positions()
        mine = []
        for t in whole:
            if adapter.padded > case.tokens:
                t = torch.cat((t, t.new_zeros(1, adapter.padded - case.tokens, *t.shape[2:])), 1)
            mine.append(adapter.prepare(t[:, positions].clone()))
        return mine

    def ready(self):
        if self.adapter is None:
            self.adapter = self.module.Peer(self.case, self.rank, self.ranks)
            self.tensors = self.tensors_of(self.adapter, self.case)

    def forward(self, adapter, tensors):
        import torch

        with torch.no_grad():
            return adapter.call(*tensors[:3])

    def both(self, adapter, tensors):
        import torch

        q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
        o = adapter.call(q, k, v)
        return (o, *torch.autograd.grad(o, (q, k, v), tensors[3].reshape(o.shape)))

    def compute(self, backward):
        self.ready()
        return self.both(self.adapter, self.tensors) if backward else (self.forward(self.adapter, self.tensors),)

    def mine(self, t):
        """Rows that are not padding, and where they are."""
        positions = self.adapter.positions()
        real = (positions < self.case.tokens) & (positions >= self.case.options.get("padding", 0))
        return self.adapter.restore(t)[:, real], positions[real]

    def verify(self, backward):
        import torch

        results = self.compute(backward)
        truth = torch.load(self.setting["oracle"], mmap=True)
        errors, norms = {}, {}
        for name, t in zip(("o", "dq", "dk", "dv"), results):
            expected_shape = self.tensors[{"o": 3, "dq": 0, "dk": 1, "dv": 2}[name]].shape
            if t.shape != expected_shape:
                raise AssertionError(f"{name} has shape {tuple(t.shape)} where {tuple(expected_shape)} was expected")
            actual, positions = self.mine(t)
            expected = truth[name][:, positions]
            errors[name] = (actual.double() - expected).abs().max().item() if actual.numel() else 0.0
            norms[name] = truth[name].abs().max().item()
        return {"errors": errors, "largest": norms}

    def time(self, backward):
        self.ready()
        if self.ranks > 1:
            import torch.distributed as dist

            dist.barrier()
        begin, worked = time.perf_counter(), time.process_time()
        self.compute(backward)
        return {"seconds": time.perf_counter() - begin, "cpu": time.process_time() - worked}

    def memory(self, backward):
        case = self.case
        small = dataclasses.replace(case, tokens=case.tokens // 16, branches=tuple((w // 16, r) for w, r in case.branches))
        warm = self.module.Peer(small, self.rank, self.ranks)
        tensors = self.tensors_of(warm, small)
        run = self.both if backward else self.forward
        run(warm, tensors)
        self.ready()
        if self.adapter.compiles:
            run(self.adapter, self.tensors)
        ctypes.CDLL(None).malloc_trim(0)
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        kept = run(self.adapter, self.tensors)  # noqa: F841  what is returned counts
        return {"bytes": resident("VmHWM") - before}

    def leak(self):
        half = self.case.tokens // 2

        def change(whole):
            for t in whole[1:3]:
                t[:, half:] = 7.0 - t[:, half:]

        before, positions = self.mine(self.compute(False)[0])
        other = self.tensors_of(self.adapter, self.case, change)
        after, _ = self.mine(self.forward(self.adapter, other))
        early = positions < half
        difference = (after - before)[:, early].double().abs()
        return {"changed": difference.max().item() if difference.numel() else 0.0}

    def loop(self, say):
        for calls in range(10**9):
            say({"calls": calls})
            self.compute(False)


def main(setting, connection, log):
    """Until there are no more commands. Whatever is printed goes to the log."""
    os.environ.update(setting["environment"])
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(descriptor, standard)

    def failed(error):
        traceback.print_exc()
        sys.stderr.flush()
        kind = "not offered" if type(error).__name__ == "NotOffered" else "error"
        text = str(error).strip().splitlines()
        connection.send({"failed": kind, "error": f"{type(error).__name__}: {text[0] if text else ''}"[:400]})

    try:
        rank = Rank(setting)
        connection.send({"ready": True})
        while True:
            command = connection.recv()
            name = command.pop("do")
            try:
                connection.send(rank.loop(connection.send) if name == "loop" else getattr(rank, name)(**command))
            except Exception as error:
                failed(error)
    except EOFError:
        pass
    except BaseException as error:
        failed(error)
    os._exit(0)  # threads of gloo may wait for ranks that are gone
