import torch.distributed as dist

from .base import Adapter


class Peer(Adapter):
    options = frozenset({"window"})

    def setup(self):
        import yunchang
        from yunchang.kernels import AttnType

        # not LongContextAttention with a ring of one rank: its backward sends to itself, which gloo cannot
        self.attention = yunchang.UlyssesAttention(dist.group.WORLD, attn_type=AttnType.FA)

    def call(self, q, k, v):
        return self.attention(q, k, v, causal=self.case.causal, window_size=self.case.options.get("window", (-1, -1)))
