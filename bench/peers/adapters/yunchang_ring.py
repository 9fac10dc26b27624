from .base import Adapter, zigzag


class Peer(Adapter):
    options = frozenset({"window", "attn_type"})

    def setup(self):
        import yunchang
        from yunchang.kernels import AttnType

        yunchang.set_seq_parallel_pg(1, self.ranks, self.rank, self.ranks)  # degrees of Ulysses and of the ring
        self.zigzag = self.case.causal
        kind = AttnType[self.case.options.get("attn_type", "FA")]
        self.attention = yunchang.LongContextAttention(ring_impl_type="zigzag" if self.zigzag else "basic", attn_type=kind)

    def positions(self):
        return zigzag(self.padded, self.rank, self.ranks) if self.zigzag else super().positions()

    def call(self, q, k, v):
        window = self.case.options.get("window", (-1, -1))
        return self.attention(q, k, v, causal=self.case.causal, window_size=window)
