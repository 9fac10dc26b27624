import torch.distributed as dist

from .base import Adapter


class Peer(Adapter):
    options = frozenset({"padding", "window", "deadline"})
    dialect = "longnet"

    def setup(self):
        from ringspan.torch import Sharding, attention, set_deadline

        self.attention = attention
        case = self.case
        self.arguments = {"causal": case.causal}
        if case.dilated:
            terms = ",".join(f"{segment}x{rate}" for segment, rate in case.branches)
            self.arguments["pattern"] = f"dilated:{terms}@{self.dialect}"
        if "padding" in case.options:
            self.arguments["cu_seqlens"] = [0, case.options["padding"], case.tokens]  # a document of its own
        if "window" in case.options:
            self.arguments["window"] = tuple(case.options["window"])
        if "deadline" in case.options:
            set_deadline(case.options["deadline"])
        if self.ranks > 1:
            self.sharding = Sharding("zigzag" if case.mask == "causal" else "contiguous", tokens=case.tokens, ranks=self.ranks)
            self.arguments.update(group=dist.group.WORLD, sharding=self.sharding)

    def positions(self):
        return self.sharding.positions(self.rank) if self.ranks > 1 else super().positions()

    def call(self, q, k, v):
        return self.attention(q, k, v, **self.arguments)
