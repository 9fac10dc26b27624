"""flash-attn 2: flash_attn_func, flash_attn_varlen_func, their packed forms, and flash_attn_with_kvcache.

    from ringspan.fronts.flash_attn import flash_attn_func

As documented by flash-attn: (batch, tokens, heads, head_dim), packed (total, heads, head_dim); causal and windows end at the lower
right corner, windows include both ends; a query that sees no key gives 0. return_attn_probs=True gives (out, lse, None), lse natural
logarithm, (batch, heads, tokens) or (heads, total), and differentiable. float32 goes too. `deterministic` changes nothing: results
always are. With `group` (an extra), q, k, v are this rank's shards.
"""

import contextlib

from .. import _check
from ..errors import InvalidArgument
from ._call import attend, check_offsets, probabilities, refuse, together, unpack, window_of


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                    deterministic=False, return_attn_probs=False, *, group=None, sharding="zigzag", strategy="auto"):  # fmt: skip
    with together(group):
        arguments = dict(window=window_of(window_size), softcap=_softcap(softcap), return_lse=probabilities(return_attn_probs, dropout_p))
    if group is not None:
        arguments.update(group=group, sharding=sharding, strategy=strategy)
    return finish(attend(q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal, alibi_slopes=alibi_slopes, layout="bshd",
                         **arguments), return_attn_probs)  # fmt: skip


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False, **extras):  # fmt: skip
    with together(extras.get("group")):
        k, v = unpack(kv, "kv", 2, 2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs, **extras)  # fmt: skip


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False, **extras):  # fmt: skip
    with together(extras.get("group")):
        q, k, v = unpack(qkv, "qkv", 3, 2)
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs, **extras)  # fmt: skip


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):  # fmt: skip
    if block_table is not None:
        refuse("block_table", "a paged KV cache", "gather the pages into k and v before the call")
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        refuse("cu_seqlens_k", f"{len(cu_seqlens_k) - 1} sequences", f"it must have as many as cu_seqlens_q ({len(cu_seqlens_q) - 1})")
    if getattr(alibi_slopes, "ndim", 1) == 2 and len(alibi_slopes) != 1:
        refuse("alibi_slopes", f"shape {tuple(alibi_slopes.shape)}: slopes of each sequence", "pad to a batch with lengths=, or call once per sequence")
    check_offsets("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q, "max_seqlen_q")
    check_offsets("cu_seqlens_k", cu_seqlens_k, k.shape[0], max_seqlen_k, "max_seqlen_k")
    return finish(attend(q, k, v, dropout_p=dropout_p, scale=softmax_scale, causal=causal, window=window_of(window_size), softcap=_softcap(softcap),
                         alibi_slopes=alibi_slopes, cu_seqlens=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, layout="thd",
                         return_lse=probabilities(return_attn_probs, dropout_p)), return_attn_probs)  # fmt: skip


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                                    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                    return_attn_probs=False):  # fmt: skip
    return flash_attn_varlen_func(q, *unpack(kv, "kv", 2, 1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
                                  softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):  # fmt: skip
    return flash_attn_varlen_func(*unpack(qkv, "qkv", 3, 1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale,
                                  causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)  # fmt: skip


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                            return_softmax_lse=False):  # fmt: skip
    """q (batch, tokens, heads, head_dim) over the first cache_seqlens (one number, or one per item; None: all) tokens of the caches
    (batch, most tokens, kv heads, head_dim), from cache_leftpad on. With k and v, new tokens, these are written behind them first, and
    are seen too. No backward pass, as there."""
    import torch

    if block_table is not None:
        refuse("block_table", "a paged KV cache", "gather the pages into k_cache and v_cache before the call")
    if cache_batch_idx is not None:
        refuse("cache_batch_idx", "rows of the caches by index", "pass k_cache[cache_batch_idx], and write new tokens into the cache yourself")
    if rotary_cos is not None or rotary_sin is not None:
        refuse("rotary_cos", "rotation inside of the call", "rotate q and k before it")
    ends, window = _cached(q, k_cache, v_cache, cache_seqlens), window_of(window_size)
    starts = _starts(cache_leftpad, ends)
    with torch.no_grad(), _appended(k_cache, v_cache, k, v, ends, cache_seqlens) as ends:
        lengths = [end - start for start, end in zip(starts, ends)]
        return attend(q, k_cache, v_cache, scale=softmax_scale, causal=causal, window=window, softcap=_softcap(softcap),
                      alibi_slopes=alibi_slopes, starts_k=starts, lengths_k=lengths, layout="bshd", return_lse=bool(return_softmax_lse))  # fmt: skip


def _cached(q, k_cache, v_cache, cache_seqlens):
    """Tokens of each item that are in the cache."""
    if k_cache.dim() != 4 or k_cache.shape[0] != q.shape[0]:
        raise InvalidArgument(f"k_cache has shape {tuple(k_cache.shape)}; expected ({q.shape[0]}, tokens, kv heads, head_dim)")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise InvalidArgument(f"v_cache has shape {tuple(v_cache.shape)}; expected (batch, tokens, kv heads) {tuple(k_cache.shape[:3])} of k_cache")
    if cache_seqlens is None:
        return [k_cache.shape[1]] * q.shape[0]
    given = cache_seqlens.tolist() if hasattr(cache_seqlens, "tolist") else cache_seqlens
    lengths = _check.integers(given if isinstance(given, (list, tuple)) else [given] * q.shape[0], "cache_seqlens")
    if len(lengths) != q.shape[0] or any(not 0 <= n <= k_cache.shape[1] for n in lengths):
        raise InvalidArgument(f"cache_seqlens ({lengths}) must be {q.shape[0]} numbers in [0, {k_cache.shape[1]}], the tokens of k_cache")
    return lengths


def _starts(cache_leftpad, ends):
    """The first token of each item in the cache."""
    if cache_leftpad is None:
        return [0] * len(ends)
    starts = _check.integers(cache_leftpad.tolist() if hasattr(cache_leftpad, "tolist") else cache_leftpad, "cache_leftpad")
    if len(starts) != len(ends) or any(not 0 <= start <= end for start, end in zip(starts, ends)):
        raise InvalidArgument(f"cache_leftpad ({starts}) must be {len(ends)} numbers, none above cache_seqlens ({ends})")
    return starts


@contextlib.contextmanager
def _appended(k_cache, v_cache, k, v, lengths, cache_seqlens):
    """The tokens of each item that are in the cache once k and v are written behind them; where what follows fails, they are not."""
    import torch

    if k is None and v is None:
        yield lengths
        return
    if k is None or v is None or cache_seqlens is None:
        missing = "k" if k is None else "v" if v is None else "cache_seqlens"
        raise InvalidArgument(f"{missing} is missing: new tokens are k and v, written into the caches at cache_seqlens")
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.dim() != 4 or rows.shape[0] != cache.shape[0] or rows.shape[1] != k.shape[1] or rows.shape[2:] != cache.shape[2:]:
            raise InvalidArgument(f"{name} has shape {tuple(rows.shape)}; expected {(cache.shape[0], k.shape[1], *cache.shape[2:])}")
        if rows.dtype != cache.dtype:
            raise InvalidArgument(f"{name}.dtype ({rows.dtype}) must equal {name}_cache.dtype ({cache.dtype})")
    ends = [n + k.shape[1] for n in lengths]
    if max(ends, default=0) > k_cache.shape[1]:
        raise InvalidArgument(f"cache_seqlens ({lengths}) and {k.shape[1]} new tokens need {max(ends)} of the cache, which has {k_cache.shape[1]}")
    items = torch.arange(len(lengths), device=k.device)[:, None]
    tokens = torch.tensor(lengths, device=k.device)[:, None] + torch.arange(k.shape[1], device=k.device)
    before = k_cache[items, tokens], v_cache[items, tokens]  # copies
    k_cache[items, tokens], v_cache[items, tokens] = k, v
    try:
        yield ends
    except Exception:
        k_cache[items, tokens], v_cache[items, tokens] = before
        raise


def _softcap(softcap):
    """As documented: none where it is not positive."""
    return softcap if not softcap <= 0 else 0.0


def finish(result, return_attn_probs):
    """flash-attn's triple (out, lse, S_dmask): without dropout there is no S_dmask."""
    return (*result, None) if return_attn_probs else result
