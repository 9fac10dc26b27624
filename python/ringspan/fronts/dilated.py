"""fkodom/dilated-attention-pytorch: DilatedAttention and MultiheadDilatedAttention.

    from ringspan.fronts.dilated import MultiheadDilatedAttention

Same constructors, same parameter names (a state_dict of the original loads). Group b of the heads attends by branch b alone, and the
output is divided by the number of branches (the `head_groups` dialect of docs/architecture.md). Unlike the original, which

- divides each branch's output by its sum over the sequence, so that outputs depend on the future and blow up near a sum of 0,
- leaves a head without a branch where the groups are of unequal size,
- ignores softmax_scale and attention_dropout, and needs a sequence that every segment divides,

the output is the attention, causal means causal, every head has its branch, and any length goes. The extras group, ranks, sharding
and strategy are those of ringspan.torch.attention.
"""

from .. import longnet
from ._call import refuse


def _check_op(op):
    if op is not None:
        refuse("op", op, "leave it None: it chooses a kernel of xformers")


class DilatedAttention(longnet.DilatedAttention):
    def __init__(self, segment_lengths, dilation_rates, softmax_scale=None, attention_dropout=0.0, op=None, **extras):
        _check_op(op)
        super().__init__(segment_lengths, dilation_rates, softmax_scale, attention_dropout, dialect="head_groups", **extras)


class MultiheadDilatedAttention(longnet.MultiheadDilatedAttention):
    def __init__(self, embed_dim, num_heads, dilation_rates, segment_lengths, dropout=0.0, bias=True, layer_norm=True,
                 layer_norm_eps=1e-5, gamma_init=1.0, device=None, dtype=None, op=None, **extras):  # fmt: skip
        _check_op(op)
        super().__init__(embed_dim, num_heads, dilation_rates, segment_lengths, dropout, bias, layer_norm, layer_norm_eps, gamma_init,
                         device, dtype, dialect="head_groups", **extras)  # fmt: skip

    def forward(self, query, key, value, is_causal=False):
        return super().forward(query, key, value, is_causal)
