"""yunchang (long-context-attention): set_seq_parallel_pg, LongContextAttention, LongContextAttentionQKVPacked, UlyssesAttention.

    from ringspan.fronts.yunchang import LongContextAttention, set_seq_parallel_pg

Tensors are (batch, local tokens, heads, head_dim), dealt as yunchang's EXTRACT_FUNC_DICT deals them: in the ring's way (basic, zigzag,
strip) between the rings, then in equal chunks within a Ulysses group. The degrees decide the layout and the group of ranks; what is sent
is planned for that whole group (strategy="auto"), and the result is the exact attention, forward and backward, with any number of heads.
"""

import enum
import functools

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, Unsupported
from ._call import attend, refuse, together, unpack, window_of, world_group


class AttnType(enum.Enum):
    AITER = "aiter"
    FA = "fa"
    FA3 = "fa3"
    FLASHINFER = "flashinfer"
    TORCH_MATH = "torch_math"
    TORCH_FLASH = "torch_flash"
    TORCH_EFFICIENT = "torch_efficient"
    TORCH_CUDNN = "torch_cudnn"
    SAGE_AUTO = "sage_auto"
    SAGE_FP16 = "sage_fp16"
    SAGE_FP16_TRITON = "sage_fp16_triton"
    SAGE_FP8 = "sage_fp8"
    SAGE_FP8_SM90 = "sage_fp8_sm90"
    SPARSE_SAGE = "sparse_sage"
    NPU = "npu"

    @classmethod
    def from_string(cls, s):
        return cls(s)


class _Groups:
    """The groups of set_seq_parallel_pg. SP_PG holds all ranks of one sequence; place[g] is (ring rank, Ulysses rank) of its rank g."""

    ULYSSES_PG = None
    RING_PG = None
    SP_PG = None
    ulysses_degree = 1
    ring_degree = 1
    place = ()


PROCESS_GROUP = _Groups()


def set_seq_parallel_pg(sp_ulysses_degree, sp_ring_degree, rank, world_size, use_ulysses_low=True):
    """Makes the groups; collective over all ranks. use_ulysses_low: neighbouring ranks form a Ulysses group, else a ring."""
    degree = sp_ulysses_degree * sp_ring_degree
    if degree < 1 or world_size % degree:
        raise InvalidArgument(f"world_size ({world_size}) must be a multiple of sp_ulysses_degree x sp_ring_degree ({degree})")
    if use_ulysses_low:
        place = tuple((g // sp_ulysses_degree, g % sp_ulysses_degree) for g in range(degree))
    else:
        place = tuple((g % sp_ring_degree, g // sp_ring_degree) for g in range(degree))

    def make(ranks):
        group = dist.new_group(ranks)
        return group if rank in ranks else None

    for offset in range(0, world_size, degree):
        for u in range(sp_ulysses_degree):
            PROCESS_GROUP.RING_PG = make([offset + g for g in range(degree) if place[g][1] == u]) or PROCESS_GROUP.RING_PG
        for r in range(sp_ring_degree):
            PROCESS_GROUP.ULYSSES_PG = make([offset + g for g in range(degree) if place[g][0] == r]) or PROCESS_GROUP.ULYSSES_PG
        PROCESS_GROUP.SP_PG = make(list(range(offset, offset + degree))) or PROCESS_GROUP.SP_PG
    PROCESS_GROUP.ulysses_degree, PROCESS_GROUP.ring_degree, PROCESS_GROUP.place = sp_ulysses_degree, sp_ring_degree, place


_RINGS = {"basic": "contiguous", "zigzag": "zigzag", "strip": "striped", "basic_pytorch": "contiguous", "basic_flashinfer": "contiguous"}
_EXACT = {AttnType.AITER, AttnType.FA, AttnType.FA3, AttnType.FLASHINFER, AttnType.TORCH_MATH, AttnType.TORCH_FLASH,
          AttnType.TORCH_EFFICIENT, AttnType.TORCH_CUDNN}  # fmt: skip


def _ring_kind(ring_impl_type):
    if ring_impl_type not in _RINGS:
        raise Unsupported(f"ring_impl_type ({ring_impl_type!r}) must be one of {', '.join(_RINGS)}")
    return _RINGS[ring_impl_type]


@functools.lru_cache(maxsize=64)
def hybrid_sharding(kind, ulysses_degree, ring_degree, place, local_tokens):
    """The Sharding of the ranks at `place`: the ring's shards, each cut into equal chunks for the Ulysses ranks."""
    from ..torch import Sharding

    tokens = local_tokens * ulysses_degree * ring_degree
    half = tokens // (2 * ring_degree)
    if kind == "zigzag" and tokens % (2 * ring_degree):
        raise InvalidArgument(f"the sequence ({tokens} tokens) must be a multiple of 2 x ring degree ({2 * ring_degree}) for zigzag")
    lists = []
    for r, u in place:
        first, last = u * local_tokens, (u + 1) * local_tokens  # of the ring's shard
        if kind == "striped":
            ranges = [(r + ring_degree * first, r + ring_degree * (last - 1), ring_degree)] if local_tokens else []
        elif kind == "contiguous":
            begin = r * ulysses_degree * local_tokens
            ranges = [(begin + first, begin + last - 1, 1)] if local_tokens else []
        else:
            front, back = r * half, (2 * ring_degree - 1 - r) * half
            ranges = [(front + first, front + min(last, half) - 1, 1)] if first < half else []
            ranges += [(back + max(first - half, 0), back + last - half - 1, 1)] if last > half else []
        lists.append(",".join(f"{a}-{b}" + (f":{step}" if step > 1 and a < b else "") for a, b, step in ranges))
    return Sharding("explicit:" + ";".join(lists), tokens=tokens, ranks=len(place))


def _check(attn_type, attn_processor, args):
    if attn_type not in _EXACT:
        raise Unsupported(f"attn_type ({attn_type}) is quantized, sparse or of another device; exact ones are {', '.join(t.name for t in _EXACT)}")
    if attn_processor is not None:
        refuse("attn_processor", type(attn_processor).__name__, "leave it None: attention is computed by Ringspan")
    if args:
        refuse("further positional arguments", len(args), "the last one is return_attn_probs")


class LongContextAttention(torch.nn.Module):
    """As in yunchang. use_sync and use_pack_qkv concern yunchang's own communication and change nothing here."""

    def __init__(self, scatter_idx=2, gather_idx=1, ring_impl_type="basic", use_pack_qkv=False, use_sync=False, attn_type=AttnType.FA,
                 attn_processor=None):  # fmt: skip
        super().__init__()
        if PROCESS_GROUP.SP_PG is None:
            raise InvalidArgument("call set_seq_parallel_pg before making a LongContextAttention")
        if (scatter_idx, gather_idx) != (2, 1):
            refuse("(scatter_idx, gather_idx)", (scatter_idx, gather_idx), "tensors are (batch, tokens, heads, head_dim): use (2, 1)")
        _check(attn_type, attn_processor, ())
        self.ring_impl_type, self.kind = ring_impl_type, _ring_kind(ring_impl_type)
        self.ring_pg, self.ulysses_pg, self.sp_pg = PROCESS_GROUP.RING_PG, PROCESS_GROUP.ULYSSES_PG, PROCESS_GROUP.SP_PG
        self.layout = (PROCESS_GROUP.ulysses_degree, PROCESS_GROUP.ring_degree, PROCESS_GROUP.place)

    def forward(self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                alibi_slopes=None, deterministic=False, return_attn_probs=False, *args):  # fmt: skip
        """Returns the output alone, as yunchang does whatever return_attn_probs says."""
        with together(self.sp_pg):
            _check(AttnType.FA, None, args)
            if key.shape[1] != query.shape[1]:
                refuse("key", f"{key.shape[1]} tokens on this rank, query {query.shape[1]}", "UlyssesAttention takes keys of another length")
            window, sharding = window_of(window_size), hybrid_sharding(self.kind, *self.layout, query.shape[1])
        return attend(query, key, value, dropout_p=dropout_p, scale=softmax_scale, causal=causal, window=window, softcap=softcap,
                      alibi_slopes=alibi_slopes, group=self.sp_pg, sharding=sharding, layout="bshd")  # fmt: skip


class LongContextAttentionQKVPacked(LongContextAttention):
    """The same with one tensor (batch, local tokens, 3, heads, head_dim)."""

    def __init__(self, scatter_idx=3, gather_idx=1, ring_impl_type="basic", use_sync=False, attn_type=AttnType.FA):
        if (scatter_idx, gather_idx) != (3, 1):
            refuse("(scatter_idx, gather_idx)", (scatter_idx, gather_idx), "qkv is (batch, tokens, 3, heads, head_dim): use (3, 1)")
        super().__init__(ring_impl_type=ring_impl_type, use_sync=use_sync, attn_type=attn_type)

    def forward(self, qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                deterministic=False, return_attn_probs=False, *args):  # fmt: skip
        with together(self.sp_pg):
            q, k, v = unpack(qkv, "qkv", 3, 2)
        return super().forward(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                               deterministic, return_attn_probs, *args)  # fmt: skip


class UlyssesAttention(torch.nn.Module):
    """As in yunchang: contiguous shards, heads dealt to ranks by all-to-all. Kv heads may be fewer than ranks."""

    def __init__(self, sequence_process_group=None, scatter_idx=2, gather_idx=1, use_sync=False, attn_type=AttnType.FA):
        super().__init__()
        if (scatter_idx, gather_idx) != (2, 1):
            refuse("(scatter_idx, gather_idx)", (scatter_idx, gather_idx), "tensors are (batch, tokens, heads, head_dim): use (2, 1)")
        _check(attn_type, None, ())
        self.spg = sequence_process_group

    def forward(self, query, key, value, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                alibi_slopes=None, deterministic=False, return_attn_probs=False, *args):  # fmt: skip
        group = world_group(self.spg, "UlyssesAttention")
        with together(group):
            _check(AttnType.FA, None, args)
            window = window_of(window_size)
        return attend(query, key, value, dropout_p=dropout_p, scale=softmax_scale, causal=causal, window=window, softcap=softcap,
                      alibi_slopes=alibi_slopes, group=group, sharding="contiguous", strategy="ulysses", layout="bshd")  # fmt: skip


def _extract(kind, value, rd, ud):
    group = PROCESS_GROUP.SP_PG
    if (rd, ud) != (PROCESS_GROUP.ring_degree, PROCESS_GROUP.ulysses_degree):
        raise InvalidArgument(
            f"(rd, ud) ({rd}, {ud}) must be those of set_seq_parallel_pg ({PROCESS_GROUP.ring_degree}, {PROCESS_GROUP.ulysses_degree})"
        )
    tokens = value.shape[1]
    if tokens % (rd * ud):
        raise InvalidArgument(f"the sequence ({tokens} tokens) must be a multiple of the number of ranks ({rd * ud})")
    sharding = hybrid_sharding(kind, ud, rd, PROCESS_GROUP.place, tokens // (rd * ud))
    positions = sharding.positions(dist.get_rank(group)).to(value.device)
    return value.index_select(1, positions)


def basic_extract_local(value, rank, world_size, *args, **kwargs):
    return _extract("contiguous", value, PROCESS_GROUP.ring_degree, PROCESS_GROUP.ulysses_degree)


def zigzag_extract_local(value, rank, world_size, rd, ud, dim=1, *args, **kwargs):
    if dim != 1:
        refuse("dim", dim, "tokens are dimension 1")
    return _extract("zigzag", value, rd, ud)


def stripe_extract_local(value, rank, world_size, rd, ud, *args, **kwargs):
    return _extract("striped", value, rd, ud)


EXTRACT_FUNC_DICT = {
    "basic": basic_extract_local,
    "strip": stripe_extract_local,
    "zigzag": zigzag_extract_local,
    "basic_pytorch": basic_extract_local,
    "basic_flashinfer": basic_extract_local,
}
