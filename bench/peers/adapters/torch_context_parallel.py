import contextlib

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental import _attention as experimental

from .base import Adapter


class Peer(Adapter):
    """context_parallel cuts the buffers that it is given in place; q, k and v come cut the same way."""

    def setup(self):
        self.mesh = init_device_mesh("cpu", (self.ranks,))
        options = getattr(experimental, "_cp_options", None)
        if options is not None:
            options.enable_load_balance = self.case.causal
        self.context = contextlib.ExitStack()
        buffer = torch.arange(self.case.tokens)
        self.context.enter_context(context_parallel(self.mesh, buffers=[buffer], buffer_seq_dims=[0], no_restore_buffers={buffer}))
        self.mine = buffer

    def positions(self):
        return self.mine

    def prepare(self, t):
        return t.transpose(1, 2).contiguous()

    def call(self, q, k, v):
        gqa = self.case.heads != self.case.kv_heads
        return torch.nn.functional.scaled_dot_product_attention(  # looked up each time: the context replaces it
            q, k, v, is_causal=self.case.causal, enable_gqa=gqa
        )

    def restore(self, o):
        o = o.to_local() if hasattr(o, "to_local") else o
        return o.transpose(1, 2)
