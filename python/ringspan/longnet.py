"""LongNet (https://arxiv.org/abs/2307.02486) as torch modules, over any number of ranks, with exact gradients.

Branch b cuts the sequence into segments of `segment_lengths[b]` tokens and keeps, in each, every `dilation_rates[b]`-th of them;
head h keeps the residue h mod rate. The branches share one softmax: a key that two of them see counts twice. Any length goes:
the last segment is shorter, nothing is padded.

With `group`, the modules work on this rank's shard, and their weights are the same on every rank: sum the gradients of the
weights over the group (docs/longnet.md).
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn

from . import _check
from .errors import InvalidArgument, UnknownArgument
from .torch import Sharding, attention
from .torch._attention import refuse_unknown
from .torch._group import together
from .torch._transport import group_of

__all__ = ["PAPER", "Branches", "DilatedAttention", "LongNetBlock", "MultiheadDilatedAttention", "geometric", "rotary"]

_DIALECTS = ("longnet", "torchscale", "head_groups")


@dataclasses.dataclass(frozen=True)
class Branches:
    """Segment lengths and dilation rates, one of each per branch."""

    segment_lengths: tuple
    dilation_rates: tuple

    def __post_init__(self):
        for name in ("segment_lengths", "dilation_rates"):
            values = tuple(_check.integers(getattr(self, name), name, 1))
            if not values:
                raise InvalidArgument(f"{name} ({getattr(self, name)!r}) must have at least one integer")
            object.__setattr__(self, name, values)
        if len(self.segment_lengths) != len(self.dilation_rates):
            raise InvalidArgument(
                f"len(segment_lengths) ({len(self.segment_lengths)}) must equal len(dilation_rates) ({len(self.dilation_rates)})"
            )

    def pattern(self, causal=False, dialect="longnet"):
        """The text of the pattern: what attention(pattern=...), ringspan.plan and the command line take."""
        if dialect not in _DIALECTS:
            raise InvalidArgument(f"dialect ({dialect!r}) must be one of {', '.join(_DIALECTS)}")
        terms = ",".join(f"{segment}x{rate}" for segment, rate in zip(self.segment_lengths, self.dilation_rates))
        return f"dilated:{terms}@{dialect}" + (" & causal" if _check.flag(causal, "causal") else "")

    def __str__(self):
        return ", ".join(f"{segment}x{rate}" for segment, rate in zip(self.segment_lengths, self.dilation_rates))


PAPER = Branches((2048, 4096, 8192, 16384, 32768), (1, 2, 4, 6, 12))  # section 4.1, the language models


def geometric(segment=2048, ratio=2, count=None, *, tokens=None):
    """The geometric branches of the paper: (segment * ratio^i) x ratio^i, i = 0, 1, ...

    Every branch sees segment keys per query and head at most, so that the cost is linear in the tokens while the reach doubles
    (ratio 2) with each branch. Give the number of branches (`count`) or the `tokens` that the last branch is to span.
    """
    if (count is None) == (tokens is None):
        raise InvalidArgument(f"give count ({count}) or tokens ({tokens}), one of them")
    segment, ratio = _check.integer(segment, "segment", 1), _check.integer(ratio, "ratio", 2)
    count, tokens = (None if n is None else _check.integer(n, name, 1) for n, name in ((count, "count"), (tokens, "tokens")))
    rates = [1]
    while len(rates) < count if count is not None else segment * rates[-1] < tokens:
        rates.append(rates[-1] * ratio)
    return Branches(tuple(segment * rate for rate in rates), tuple(rates))


def _refuse(names, own):
    """Raises for the first of the names that is in own, {name: what to use instead}: the module decides that argument."""
    for name in names:
        if name in own:
            raise UnknownArgument(f"'{name}' cannot be given here: {own[name]}")


_DECIDED = {
    "pattern": "it follows from segment_lengths, dilation_rates and is_causal",
    "causal": "it is is_causal= of the call",
}
_MADE = {
    **_DECIDED,
    "dropout_p": "it is attention_dropout= here, dropout= of the modules around it",
    "scale": "it is softmax_scale= here",
}
_OF_LAYER = {"layout": "x is (batch, tokens, embed_dim)", "return_lse": "the layer gives its output and None"}


def check_input(x, name, embed_dim):
    if not isinstance(x, torch.Tensor):
        raise InvalidArgument(f"{name} ({type(x).__name__}) must be a torch.Tensor")
    if x.dim() != 3 or x.shape[-1] != embed_dim:
        raise InvalidArgument(f"{name} has shape {tuple(x.shape)}; expected (batch, tokens, embed_dim = {embed_dim})")


class Options:
    """Where and how attention runs. Copies of a module share it: a process group cannot be copied."""

    def __init__(self, **options):
        self.options = options

    def __deepcopy__(self, memo):
        return self


class DilatedAttention(nn.Module):
    """Dilated attention of q, k, v (batch, tokens, heads, head_dim); k and v may have fewer heads.

    dialect: "longnet" is the paper; "torchscale" and "head_groups" are described in docs/architecture.md. `group`, `ranks`,
    `sharding` and `strategy` are those of ringspan.torch.attention, and further arguments of it may be given by name. Tensors
    among them, such as sinks, become parameters of the module where they are nn.Parameter, else buffers.
    """

    def __init__(self, segment_lengths, dilation_rates, softmax_scale=None, attention_dropout=0.0, *, dialect="longnet", group=None,
                 ranks=None, sharding="zigzag", strategy="auto", **options):  # fmt: skip
        super().__init__()
        _refuse(options, _MADE)
        refuse_unknown(options)
        self.branches = Branches(segment_lengths, dilation_rates)
        self.patterns = {causal: self.branches.pattern(causal, dialect) for causal in (False, True)}
        self.dialect = dialect
        self.dropout_p = _check.dropout(attention_dropout, "attention_dropout")
        self._tensors = [name for name, value in options.items() if isinstance(value, torch.Tensor)]
        for name in self._tensors:
            value = options.pop(name)
            register = self.register_parameter if isinstance(value, nn.Parameter) else self.register_buffer
            register(name, value)
        self._call = Options(scale=softmax_scale, group=group, ranks=ranks, sharding=sharding, strategy=strategy, **options)

    def _arguments(self, options):
        """Those of a call of attention(): of the module, and in place of them those of the call."""
        return {**self._call.options, **{name: getattr(self, name) for name in self._tensors}, **options}

    def forward(self, query, key, value, is_causal=False, **options):
        """`options` are arguments of ringspan.torch.attention for this call, such as cu_seqlens or return_lse."""
        arguments = self._arguments({"dropout_p": self.dropout_p if self.training else 0.0, **options})
        with together(arguments["group"]):
            _refuse(options, _DECIDED)
            pattern = self.patterns[_check.flag(is_causal, "is_causal")]
        return attention(query, key, value, pattern=pattern, **arguments)

    def extra_repr(self):
        return f"{self.branches}, dialect={self.dialect}"


def rotary(x, positions, base=10000.0):
    """x (batch, tokens, heads, head_dim), rotated by the tokens' positions (tokens,) or (batch, tokens): RoPE, in halves.

    Over ranks the positions are global: Sharding.positions().
    """
    if not isinstance(x, torch.Tensor) or x.dim() != 4 or not x.is_floating_point():
        is_a = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
        raise InvalidArgument(f"x ({is_a}) must be a tensor of floats (batch, tokens, heads, head_dim)")
    batch, tokens, _, head_dim = x.shape
    if head_dim % 2:
        raise InvalidArgument(f"head_dim ({head_dim}) must be even to be rotated")
    if not isinstance(positions, torch.Tensor):
        try:
            positions = torch.tensor(positions)  # of NumPy, as ringspan.Sharding has them, or a list
        except (TypeError, ValueError, RuntimeError):
            raise InvalidArgument(f"positions ({type(positions).__name__}) must be a tensor of numbers") from None
    if positions.dtype == torch.bool or positions.is_complex():
        raise InvalidArgument(f"positions ({positions.dtype}) must be numbers")
    if tuple(positions.shape) not in ((tokens,), (1, tokens), (batch, tokens)):
        raise InvalidArgument(f"positions have shape {tuple(positions.shape)}; expected ({tokens},) or ({batch}, {tokens})")
    half = head_dim // 2
    frequency = _check.positive(base, "base") ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = positions.to(device=x.device, dtype=torch.float64).unsqueeze(-1) * frequency  # float32 loses far positions
    cos, sin = (f(angle).to(x.dtype).unsqueeze(-2) for f in (torch.cos, torch.sin))
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MultiheadDilatedAttention(nn.Module):
    """Projections around dilated attention, with MAGNETO's layer norm before the last one (layer_norm=False leaves it out).

    x is (batch, tokens, embed_dim). num_kv_heads < num_heads shares keys between heads. With rope_base q and k are rotated; then
    forward needs the tokens' global positions as soon as they are not 0, 1, 2, ...
    """

    def __init__(self, embed_dim, num_heads, dilation_rates, segment_lengths, dropout=0.0, bias=True, layer_norm=True,
                 layer_norm_eps=1e-5, gamma_init=1.0, device=None, dtype=None, *, num_kv_heads=None, rope_base=None, **attention):  # fmt: skip
        super().__init__()
        _refuse(attention, {**_OF_LAYER, "attention_dropout": "it is dropout= here"})
        embed_dim, num_heads = _check.integer(embed_dim, "embed_dim", 1), _check.integer(num_heads, "num_heads", 1)
        kv_heads = num_heads if num_kv_heads is None else _check.integer(num_kv_heads, "num_kv_heads", 1)
        if embed_dim % num_heads:
            raise InvalidArgument(f"embed_dim ({embed_dim}) must be divisible by num_heads ({num_heads})")
        if num_heads % kv_heads:
            raise InvalidArgument(f"num_heads ({num_heads}) must be divisible by num_kv_heads ({kv_heads})")
        self.embed_dim, self.num_heads, self.num_kv_heads = embed_dim, num_heads, kv_heads
        self.head_dim = embed_dim // num_heads
        if rope_base is not None and self.head_dim % 2:
            raise InvalidArgument(f"head_dim (embed_dim / num_heads = {self.head_dim}) must be even to be rotated")
        self.gamma_init = gamma_init
        self.rope_base = None if rope_base is None else _check.positive(rope_base, "rope_base")
        factory = {"device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.k_proj = nn.Linear(embed_dim, kv_heads * self.head_dim, bias=bias, **factory)
        self.v_proj = nn.Linear(embed_dim, kv_heads * self.head_dim, bias=bias, **factory)
        dropout = _check.dropout(dropout, "dropout")
        self.attention = DilatedAttention(segment_lengths, dilation_rates, attention_dropout=dropout, **attention)
        self.norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps, **factory) if layer_norm else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.reset_parameters()

    def reset_parameters(self):
        """Xavier; v and out are scaled by gamma_init (https://arxiv.org/abs/2210.06423, figure 2)."""
        for projection, gain in ((self.q_proj, 1.0), (self.k_proj, 1.0), (self.v_proj, self.gamma_init), (self.out_proj, self.gamma_init)):
            nn.init.xavier_normal_(projection.weight, gain=gain)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(self, query, key=None, value=None, is_causal=False, *, positions=None, **options):
        """(output, None), as nn.MultiheadAttention; key and value default to query and key."""
        key = query if key is None else key
        value = key if value is None else value
        arguments = self.attention._arguments(options)
        with together(arguments["group"]):  # up to attention(), which does so itself
            _refuse(options, _OF_LAYER)
            for x, name in ((query, "query"), (key, "key"), (value, "value")):
                check_input(x, name, self.embed_dim)
            q = self.q_proj(query).unflatten(-1, (self.num_heads, self.head_dim))
            k = self.k_proj(key).unflatten(-1, (self.num_kv_heads, self.head_dim))
            v = self.v_proj(value).unflatten(-1, (self.num_kv_heads, self.head_dim))
            if self.rope_base is not None:
                positions = self._positions(q, k, positions, arguments)
                q, k = rotary(q, positions, self.rope_base), rotary(k, positions, self.rope_base)
            elif positions is not None:
                raise InvalidArgument("positions are given, but nothing is rotated: rope_base is None")
        x = self.attention(q, k, v, is_causal, layout="bshd", **options).flatten(-2)
        if self.norm is not None:
            x = self.norm(x)
        return self.out_proj(x), None

    def _positions(self, q, k, positions, arguments):
        if q.shape[1] != k.shape[1]:
            raise InvalidArgument(f"query has {q.shape[1]} tokens and key {k.shape[1]}; rotated, they must be the same tokens")
        for name in ("sharding_k", "replicated_q"):
            value = arguments.get(name)
            if value:
                raise InvalidArgument(f"{name} ({value!r}) deals keys in another way than queries; rotated, they must be the same tokens")
        if positions is not None:
            return positions
        group, sharding = arguments["group"], arguments["sharding"]
        if group is None:
            return torch.arange(q.shape[1], device=q.device)
        if not isinstance(sharding, Sharding):
            raise InvalidArgument(
                "positions are needed: tokens of a shard do not stand at 0, 1, 2, ...; give Sharding.positions(), or a Sharding "
                f"in place of '{sharding}'"
            )
        group = group_of(group)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        if ranks != sharding.ranks:
            raise InvalidArgument(f"the group has {ranks} ranks, but the sharding {sharding.ranks}")
        positions = sharding.positions(rank)
        if positions.shape[0] != q.shape[1]:
            raise InvalidArgument(f"{sharding!r} deals {positions.shape[0]} tokens to rank {rank}, which has {q.shape[1]}")
        return positions


class LongNetBlock(nn.Module):
    """A layer of LongNet's transformer: attention and a feed-forward part, each between a layer norm and a residual, each with
    MAGNETO's second norm inside. An example to build on; nothing here is special to ranks but `positions`."""

    def __init__(self, embed_dim, num_heads, segment_lengths, dilation_rates, *, feedforward_dim=None, dropout=0.0, bias=True,
                 layer_norm_eps=1e-5, gamma_init=1.0, rope_base=10000.0, device=None, dtype=None, **attention):  # fmt: skip
        super().__init__()
        _refuse(attention, {"layer_norm": "the block has MAGNETO's norms"})
        embed_dim = _check.integer(embed_dim, "embed_dim", 1)
        hidden = 4 * embed_dim if feedforward_dim is None else _check.integer(feedforward_dim, "feedforward_dim", 1)
        factory = {"device": device, "dtype": dtype}
        self.attention_norm = nn.LayerNorm(embed_dim, eps=layer_norm_eps, **factory)
        self.attention = MultiheadDilatedAttention(
            embed_dim, num_heads, dilation_rates, segment_lengths, dropout, bias, True, layer_norm_eps, gamma_init,
            rope_base=rope_base, **factory, **attention,
        )  # fmt: skip
        self.feedforward = nn.Sequential(
            nn.LayerNorm(embed_dim, eps=layer_norm_eps, **factory),
            nn.Linear(embed_dim, hidden, bias=bias, **factory),
            nn.GELU(),
            nn.LayerNorm(hidden, eps=layer_norm_eps, **factory),
            nn.Linear(hidden, embed_dim, bias=bias, **factory),
        )
        for layer in (self.feedforward[1], self.feedforward[4]):
            nn.init.xavier_normal_(layer.weight, gain=gamma_init)
            if bias:
                nn.init.zeros_(layer.bias)

    def forward(self, x, is_causal=True, *, positions=None, **options):
        with together(self.attention.attention._arguments(options)["group"]):
            check_input(x, "x", self.attention.embed_dim)
            normed = self.attention_norm(x)
        x = x + self.attention(normed, is_causal=is_causal, positions=positions, **options)[0]
        return x + self.feedforward(x)
