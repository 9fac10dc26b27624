import torch

from .base import HeadsInTurns

BUCKET = 1024


class Peer(HeadsInTurns):
    options = frozenset({"padding", "bucket", "striped", "early_call", "pad", "head_order"})

    @staticmethod
    def before_group(case):
        if case.options.get("early_call"):
            from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

            x = torch.ones(1, 8, 1, 8)
            ring_flash_attn(x, x, x, ring_reduce_col=True, bucket_size=8)

    def setup(self):
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

        self.ring = ring_flash_attn
        if self.case.options.get("pad", True):
            self.padded = -(-self.case.tokens // self.ranks) * self.ranks
        self.local = self.padded // self.ranks
        self.bucket = self.case.options.get("bucket", min(BUCKET, self.local))
        self.striped = self.case.causal and self.case.options.get("striped", self.local % self.bucket == 0)
        self.mask = None
        if "padding" in self.case.options or self.padded > self.case.tokens:
            positions = self.positions()
            self.mask = ((positions >= self.case.options.get("padding", 0)) & (positions < self.case.tokens))[None]

    def positions(self):
        if not self.striped:
            return super().positions()
        # its rotary embedding's: bucket b of rank r holds every (ranks * buckets)-th token, from r * buckets + b on
        buckets = self.local // self.bucket
        n, b = torch.arange(self.bucket), torch.arange(buckets)
        return (n[None, :] * self.ranks * buckets + self.rank * buckets + b[:, None]).flatten()

    def call(self, q, k, v):
        return self.ring(q, k, v, mask=self.mask, causal=self.case.causal, bucket_size=self.bucket, ring_reduce_col=True,
                         striped_ring_attn=self.striped)  # fmt: skip
