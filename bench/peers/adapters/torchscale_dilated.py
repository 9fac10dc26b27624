import types

import torch

from .base import Adapter


class Peer(Adapter):
    options = frozenset({"padding"})
    gqa = value_dim = False

    def setup(self):
        import on_cpu
        from torchscale.component.dilated_attention import DilatedAttention

        on_cpu.install()
        case = self.case
        args = types.SimpleNamespace(
            flash_attention=True, segment_length=[w for w, _ in case.branches], dilated_ratio=[r for _, r in case.branches],
            seq_parallel=self.ranks > 1, multiway=False, xpos_rel_pos=False, layernorm_eps=1e-5)  # fmt: skip
        width = case.heads * case.head_dim
        self.attention = DilatedAttention(args, width, case.heads, self_attention=True)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            setattr(self.attention, projection, torch.nn.Identity())
        self.padding = None
        if "padding" in case.options:
            self.padding = (self.positions() < case.options["padding"])[None]

    def prepare(self, t):
        return t.flatten(2).contiguous()

    def call(self, q, k, v):
        return self.attention(q, k, v, key_padding_mask=self.padding, is_causal=self.case.causal)[0]

    def restore(self, o):
        return o.unflatten(2, (self.case.heads, self.case.value_dim))
