"""flash-attn 2: flash_attn_func, flash_attn_varlen_func and their packed forms.

    from ringspan.fronts.flash_attn import flash_attn_func

As documented by flash-attn: (batch, tokens, heads, head_dim), packed (total, heads, head_dim); causal and windows end at the lower
right corner, windows include both ends; a query that sees no key gives 0. return_attn_probs=True gives (out, lse, None), lse natural
logarithm, (batch, heads, tokens) or (heads, total), and differentiable. float32 goes too. `deterministic` changes nothing: results
always are. With `group` (an extra), q, k, v are this rank's shards.
"""

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


def _softcap(softcap):
    """As documented: none where it is not positive."""
    return softcap if not softcap <= 0 else 0.0


def finish(result, return_attn_probs):
    """flash-attn's triple (out, lse, S_dmask): without dropout there is no S_dmask."""
    return (*result, None) if return_attn_probs else result
