"""ring-flash-attention (zhuzilin): the ring, zigzag ring, stripe and llama3 functions, and the adapter for Hugging Face.

    from ringspan.fronts.ring_flash_attn import zigzag_ring_flash_attn_func

Every rank passes its own shard, (batch, local tokens, heads, head_dim); group=None means all ranks. Rank r of P holds chunk r (ring),
chunks r and 2P - 1 - r of 2P (zigzag), tokens r, r + P, ... (stripe); in the varlen functions of every sequence by itself, and
cu_seqlens are those of this rank's shard (the global ones divided by P), except in llama3_flash_attn_*, where the packed tokens are cut
into P equal chunks. return_attn_probs=True gives (out, lse, None).

What the originals refuse or get wrong works: windows, ALiBi and dropout in global positions, zigzag and stripe without causal.
"""

import functools

import torch

from .._check import integer
from ..errors import InvalidArgument
from ._call import attend, check_offsets, meet, probabilities, together, unpack, window_of, world_group
from .flash_attn import finish


@functools.lru_cache(maxsize=64)
def _document_sharding(kind, offsets, ranks):
    from ..torch import Sharding

    return Sharding.of_documents(kind, offsets, ranks=ranks)


def _batch_functions(name, kind):
    """name_func, name_kvpacked_func, name_qkvpacked_func."""

    def func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None, deterministic=False,
             return_attn_probs=False, group=None):  # fmt: skip
        group = world_group(group, f"{name}_func")
        with together(group):
            arguments = dict(window=window_of(window_size), return_lse=probabilities(return_attn_probs, dropout_p))
        result = attend(q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal, alibi_slopes=alibi_slopes, group=group, sharding=kind,
                        strategy="ring", layout="bshd", **arguments)  # fmt: skip
        return finish(result, return_attn_probs)

    def kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                      deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
        with together(world_group(group, f"{name}_kvpacked_func")):
            k, v = unpack(kv, "kv", 2, 2)
        return func(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
                    return_attn_probs, group)  # fmt: skip

    def qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                       deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
        with together(world_group(group, f"{name}_qkvpacked_func")):
            q, k, v = unpack(qkv, "qkv", 3, 2)
        return func(q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
                    return_attn_probs, group)  # fmt: skip

    return _named(name, kind, func, kvpacked_func, qkvpacked_func)


def _varlen_functions(name, kind):
    """name_varlen_func, name_varlen_kvpacked_func, name_varlen_qkvpacked_func."""

    def func(q, k, v, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
             deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
        group = world_group(group, f"{name}_func")
        ranks = torch.distributed.get_world_size(group)
        with together(group):
            local = check_offsets("cu_seqlens", cu_seqlens, q.shape[0], max_seqlen, "max_seqlen")
            if kind == "zigzag" and any(offset % 2 for offset in local):
                raise InvalidArgument(f"cu_seqlens ({local}) must be even: a rank holds two chunks of equal length of every sequence")
            arguments = dict(window=window_of(window_size), return_lse=probabilities(return_attn_probs, dropout_p))
        offsets = tuple(offset * ranks for offset in local)
        result = attend(q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal, alibi_slopes=alibi_slopes,
                        cu_seqlens=torch.tensor(offsets, dtype=torch.int64, device="cpu"), group=group,
                        sharding=_document_sharding(kind, offsets, ranks), strategy="ring", layout="thd", **arguments)  # fmt: skip
        return finish(result, return_attn_probs)

    def kvpacked_func(q, kv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                      alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
        with together(world_group(group, f"{name}_kvpacked_func")):
            k, v = unpack(kv, "kv", 2, 1)
        return func(q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                    deterministic, return_attn_probs, group)  # fmt: skip

    def qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                       alibi_slopes=None, deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
        with together(world_group(group, f"{name}_qkvpacked_func")):
            q, k, v = unpack(qkv, "qkv", 3, 1)
        return func(q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                    deterministic, return_attn_probs, group)  # fmt: skip

    return _named(f"{name}", f"{kind}, every sequence by itself", func, kvpacked_func, qkvpacked_func)


def _named(name, how, *functions):
    for function in functions:
        function.__name__ = function.__qualname__ = f"{name}_{function.__name__}"
        function.__doc__ = f"As in ring-flash-attention; shards are {how}."
    return functions


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _batch_functions("ring_flash_attn", "contiguous")
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _batch_functions(
    "zigzag_ring_flash_attn", "zigzag"
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _batch_functions("stripe_flash_attn", "striped")

ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _varlen_functions(
    "ring_flash_attn_varlen", "contiguous"
)
zigzag_ring_flash_attn_varlen_func, zigzag_ring_flash_attn_varlen_kvpacked_func, zigzag_ring_flash_attn_varlen_qkvpacked_func = (
    _varlen_functions("zigzag_ring_flash_attn_varlen", "zigzag")
)
stripe_flash_attn_varlen_func, stripe_flash_attn_varlen_kvpacked_func, stripe_flash_attn_varlen_qkvpacked_func = _varlen_functions(
    "stripe_flash_attn_varlen", "striped"
)


def llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal, rank, world_size):
    """cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice of a rank's chunk: the sequences of its queries, and the
    keys that these read."""
    offsets = check_offsets("cu_seqlens", cu_seqlens, None, None, None)
    if offsets[-1] % world_size:
        raise InvalidArgument(f"cu_seqlens ends at {offsets[-1]}, which world_size ({world_size}) must divide")
    length = offsets[-1] // world_size
    begin, end = rank * length, (rank + 1) * length
    left = max(i for i, offset in enumerate(offsets) if offset <= begin)
    right = min(i for i, offset in enumerate(offsets) if offset >= end)
    bounds = offsets[left : right + 1]
    queries = [min(max(offset - begin, 0), length) for offset in bounds]
    keys = [offset - bounds[0] for offset in bounds[:-1]] + [(end if causal else bounds[-1]) - bounds[0]]
    like = dict(dtype=cu_seqlens.dtype, device=cu_seqlens.device) if isinstance(cu_seqlens, torch.Tensor) else dict(dtype=torch.int32)
    longest = [max(b - a for a, b in zip(part, part[1:])) for part in (queries, keys)]
    return torch.tensor(queries, **like), torch.tensor(keys, **like), *longest, slice(bounds[0], end if causal else bounds[-1])


def _gathered_offsets(cu_seqlens_q, local_k_slice, group):
    """cu_seqlens of all tokens: every rank knows where sequences begin among its own, and whether its first one began before."""
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    *begins, length = cu_seqlens_q
    mine = [rank * length + offset for offset in begins[1:]]
    mine += [rank * length] if local_k_slice.start == rank * length else []
    everyone = [None] * ranks
    torch.distributed.all_gather_object(everyone, (length, mine), group=group)
    if len({length for length, _ in everyone}) > 1:
        raise InvalidArgument(f"ranks hold {[length for length, _ in everyone]} tokens; llama3_flash_attn needs equal chunks")
    return tuple(sorted({0, ranks * length}.union(*(begins for _, begins in everyone))))


def llama3_flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice,
                                  dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                                  deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    """cu_seqlens_q ... local_k_slice are what llama3_flash_attn_prepare_cu_seqlens returned for this rank. heads_k_stride, how many kv
    heads the original gathers at a time, is checked; Ringspan's plan decides about memory."""
    group = world_group(group, "llama3_flash_attn_varlen_func")
    with together(group):
        if k.shape[1] % integer(heads_k_stride, "heads_k_stride", 1):
            raise InvalidArgument(f"heads_k_stride ({heads_k_stride}) must divide the number of kv heads ({k.shape[1]})")
        if not isinstance(local_k_slice, slice):
            raise InvalidArgument(f"local_k_slice ({local_k_slice!r}) must be a slice")
        given = (
            check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q, "max_seqlen_q"),
            check_offsets("cu_seqlens_k", cu_seqlens_k, None, max_seqlen_k, "max_seqlen_k"),
            local_k_slice,
        )
    meet(group, "llama3_flash_attn_varlen_func")
    offsets = _gathered_offsets(given[0], local_k_slice, group)
    ranks, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    expected = llama3_flash_attn_prepare_cu_seqlens(torch.tensor(offsets, device="cpu"), causal, rank, ranks)
    with together(group):
        if given != (expected[0].tolist(), expected[1].tolist(), expected[4]):
            raise InvalidArgument(
                f"cu_seqlens_q, cu_seqlens_k, local_k_slice {given} are not those of llama3_flash_attn_prepare_cu_seqlens(..., "
                f"causal={causal}, rank={rank}, world_size={ranks}) for sequences without empty ones"
            )
    return _packed(q, k, v, offsets, group, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs)


def _packed(q, k, v, offsets, group, dropout_p, softmax_scale, causal, window_size, alibi_slopes, return_attn_probs):
    """Packed tokens in equal chunks, with the offsets of all of them."""
    with together(group):
        arguments = dict(window=window_of(window_size), return_lse=probabilities(return_attn_probs, dropout_p))
    result = attend(q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal, alibi_slopes=alibi_slopes,
                    cu_seqlens=torch.tensor(offsets, dtype=torch.int64, device="cpu"), group=group, sharding="contiguous", layout="thd",
                    **arguments)  # fmt: skip
    return finish(result, return_attn_probs)


def llama3_flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice,
                                           dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                                           deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    group = world_group(group, "llama3_flash_attn_varlen_kvpacked_func")
    with together(group):
        k, v = unpack(kv, "kv", 2, 1)
    return llama3_flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                         heads_k_stride, local_k_slice, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                                         deterministic, return_attn_probs, group)  # fmt: skip


def llama3_flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice,
                                            dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), alibi_slopes=None,
                                            deterministic=False, return_attn_probs=False, group=None):  # fmt: skip
    group = world_group(group, "llama3_flash_attn_varlen_qkvpacked_func")
    with together(group):
        q, k, v = unpack(qkv, "qkv", 3, 1)
    return llama3_flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                                         heads_k_stride, local_k_slice, dropout_p, softmax_scale, causal, window_size, alibi_slopes,
                                         deterministic, return_attn_probs, group)  # fmt: skip


def substitute_hf_flash_attn(process_group, heads_k_stride):
    """Makes attn_implementation="flash_attention_2" of transformers models attend across process_group, as the original does: packed
    sequences in one row, cut into equal chunks; update_ring_flash_attn_params gives their offsets before each forward."""
    from . import transformers

    transformers.substitute_flash_attention(process_group, heads_k_stride)


def update_ring_flash_attn_params(cu_seqlens, process_group):
    """The offsets of all packed sequences across the group, for the next forward of the substituted models."""
    from . import transformers

    transformers.update_documents(cu_seqlens, process_group)


def use_ring_attn(flag):
    """False: the substituted models attend locally again."""
    from . import transformers

    transformers.use_ring(flag)
