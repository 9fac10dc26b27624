"""torchscale's dilated attention needs CUDA for two things only; install() gives it those on a CPU."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "flash_attn_on_cpu"))


def install():
    from flash_attn import flash_attn_func
    from torchscale.component import multihead_attention

    def flash(q, k, v, dropout=0.0, bias=None, softmax_scale=None, is_causal=False):  # torchscale's wrapper of flash-attn
        assert bias is None
        out, lse, _ = flash_attn_func(q, k, v, dropout_p=dropout, softmax_scale=softmax_scale, causal=is_causal, return_attn_probs=True)
        return out, lse

    multihead_attention.flash_attn_func = flash
    torch.cuda.current_device = lambda: torch.device("cpu")  # where its all-gather puts what it receives
