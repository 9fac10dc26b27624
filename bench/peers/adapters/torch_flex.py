import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .base import Adapter


class Peer(Adapter):
    options = frozenset({"padding", "window"})
    compiles = True

    def setup(self):
        case = self.case
        padding = case.options.get("padding", 0)
        left, right = case.options.get("window", (case.tokens, case.tokens))

        def times(h, i, j):
            n = 0
            for segment, rate in case.branches:
                n = n + ((i // segment == j // segment) & (i % segment % rate == h % rate) & (j % segment % rate == h % rate)).int()
            return n

        def mask(b, h, i, j):
            allowed = (j >= padding) & (j >= i - left) & (j <= i + right)
            if case.causal:
                allowed = allowed & (j <= i)
            return allowed & (times(h, i, j) > 0) if case.dilated else allowed

        def score(s, b, h, i, j):
            return s + torch.log(times(h, i, j).to(s.dtype))

        self.score = score if case.dilated else None
        self.mask = None
        if case.mask != "full" or case.options:
            heads = case.heads if case.dilated else None
            self.mask = create_block_mask(mask, None, heads, case.tokens, case.tokens, device="cpu")
        self.attention = torch.compile(flex_attention, dynamic=False)

    def prepare(self, t):
        return t.transpose(1, 2).contiguous()

    def call(self, q, k, v):
        gqa = self.case.heads != self.case.kv_heads
        return self.attention(q, k, v, score_mod=self.score, block_mask=self.mask, enable_gqa=gqa)

    def restore(self, o):
        return o.transpose(1, 2)
