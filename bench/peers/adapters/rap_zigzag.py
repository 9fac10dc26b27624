import torch

from .base import HeadsInTurns, zigzag


class Peer(HeadsInTurns):
    options = frozenset({"padding", "window"})

    def setup(self):
        from ring_attention_pytorch.zig_zag_attention import zig_zag_attn

        self.attention = zig_zag_attn
        self.padded = -(-self.case.tokens // (2 * self.ranks)) * 2 * self.ranks  # as zig_zag_pad_seq
        keys = torch.cat([zigzag(self.padded, r, self.ranks) for r in range(self.ranks)])  # in the order of its all-gather
        self.mask = self.allowed(self.positions(), keys)

    def positions(self):
        return zigzag(self.padded, self.rank, self.ranks)

    def prepare(self, t):
        return super().prepare(t).transpose(1, 2).contiguous()

    def call(self, q, k, v):
        return self.attention(q, k, v, attn_mask=self.mask)

    def restore(self, o):
        return super().restore(o.transpose(1, 2))
