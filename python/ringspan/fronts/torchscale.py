"""torchscale's DilatedAttention (LongNet as Microsoft published it).

    from ringspan.fronts.torchscale import DilatedAttention

Same constructor, forward and parameter names (a state_dict of the original loads). The forward is torchscale's, and so are the
gradients: the weights that merge the branches are constants to them (`torchscale` dialect of docs/architecture.md). dialect="longnet"
gives the gradients of the forward. Equal to the original where it is right: where rates divide segments, and segments the sequence or
with is_causal. Elsewhere the original attends to zero padding, and where a rate does not divide its segment it shifts the outputs of later
segments by that; this does neither. args.seq_parallel=True means shards in
the order of the ranks, over `group` (all ranks where it is None), as in the original, whose result is then wrong for causal attention.

Dropout of probabilities is active in training only; the original leaves it on in evaluation.
"""

import math

from torch import nn

from .. import _check
from ..errors import InvalidArgument
from ..longnet import Branches, Options, check_input
from ._call import attend, refuse, together, world_group


class DilatedAttention(nn.Module):
    def __init__(self, args, embed_dim, num_heads, dropout=0.0, self_attention=False, encoder_decoder_attention=False, subln=False, *,
                 group=None, dialect="torchscale", strategy="auto"):  # fmt: skip
        super().__init__()
        if bool(self_attention) == bool(encoder_decoder_attention):
            raise InvalidArgument("one of self_attention and encoder_decoder_attention must be set")
        embed_dim, num_heads = _check.integer(embed_dim, "embed_dim", 1), _check.integer(num_heads, "num_heads", 1)
        if embed_dim % num_heads:
            raise InvalidArgument(f"embed_dim ({embed_dim}) must be divisible by num_heads ({num_heads})")
        if getattr(args, "multiway", False):
            refuse("args.multiway", True, "use a DilatedAttention per way")
        if getattr(args, "xpos_rel_pos", False):
            refuse("args.xpos_rel_pos", True, "rotate q and k before ringspan.torch.attention(pattern=...)")
        self.args, self.embed_dim, self.num_heads, self.head_dim = args, embed_dim, num_heads, embed_dim // num_heads
        self.scaling, self.dropout = self.head_dim**-0.5, _check.dropout(dropout, "dropout")
        self.self_attention, self.encoder_decoder_attention = self_attention, encoder_decoder_attention
        branches = Branches(args.segment_length, args.dilated_ratio)
        self.patterns = {causal: branches.pattern(causal, dialect) for causal in (False, True)}
        self._ranks = Options(group=group, strategy=strategy)
        self.k_proj = nn.Linear(embed_dim, embed_dim)
        self.v_proj = nn.Linear(embed_dim, embed_dim)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        self.inner_attn_ln = nn.LayerNorm(embed_dim, eps=args.layernorm_eps) if subln and self_attention else None

    def reset_parameters(self):
        for projection in (self.k_proj, self.v_proj, self.q_proj):
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(self, query, key, value, incremental_state=None, key_padding_mask=None, attn_mask=None, rel_pos=None, is_first_step=False,
                is_causal=False):  # fmt: skip
        """(output, None); tensors are (batch, tokens, embed_dim)."""
        arguments = self._ranks.options
        seq_parallel = getattr(self.args, "seq_parallel", False)
        if seq_parallel:
            arguments = {**arguments, "group": world_group(arguments["group"], "args.seq_parallel"), "sharding": "contiguous"}
        with together(arguments["group"]):
            if arguments["group"] is not None and not seq_parallel:
                raise InvalidArgument("group is given, but args.seq_parallel is not set")
            if incremental_state is not None:
                refuse("incremental_state", "decoding step by step", "pass all tokens")
            if key_padding_mask is not None:
                refuse("key_padding_mask", f"{tuple(key_padding_mask.shape)}, which the original ignores",
                       "pad on the right with is_causal=True, or use lengths= of ringspan.torch.attention")  # fmt: skip
            if attn_mask is not None:
                refuse("attn_mask", tuple(attn_mask.shape), "use is_causal=True, or a pattern of ringspan.torch.attention")
            if rel_pos is not None:
                refuse("rel_pos", tuple(rel_pos.shape), "use alibi_slopes= of ringspan.torch.attention for linear biases")
            pattern = self.patterns[_check.flag(is_causal, "is_causal")]
            for x, name in ((query, "query"), (key, "key"), (value, "value")):
                check_input(x, name, self.embed_dim)
            projected = self.q_proj(query), self.k_proj(key), self.v_proj(value)
            q, k, v = (x.unflatten(-1, (self.num_heads, -1)) for x in projected)
        dropout_p = self.dropout if self.training else 0.0
        x = attend(q, k, v, pattern=pattern, dropout_p=dropout_p, layout="bshd", **arguments).flatten(-2)
        if self.inner_attn_ln is not None:
            x = self.inner_attn_ln(x)
        return self.out_proj(x), None
