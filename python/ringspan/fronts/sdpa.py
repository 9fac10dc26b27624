"""torch.nn.functional.scaled_dot_product_attention.

    from ringspan.fronts.sdpa import scaled_dot_product_attention

As documented by torch: (..., heads, tokens, head_dim), a causal mask that begins at the upper left corner, a boolean mask whose
True means "attends". Boolean masks become slices of a pattern (exactly, or Unsupported); float masks are refused: what they add to
scores is no mask. A query that sees no key gives 0. With `group`, tensors are this rank's shards and a mask covers all tokens.
"""

import math

import torch

from ..errors import InvalidArgument, Unsupported
from ._call import attend, together
from ._masks import attend_parts, lower_mask


def scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, *,
                                 group=None, sharding="zigzag", strategy="auto") -> torch.Tensor:  # fmt: skip
    with together(group):
        _check(query, key, value, attn_mask, is_causal, enable_gqa)
        mask = None if attn_mask is None else _boolean(attn_mask, query)
    lead = query.shape[:-3]
    batch = math.prod(lead)  # -1 is no number where there are no tokens
    q, k, v = (t.reshape(batch, *t.shape[-3:]).transpose(1, 2) for t in (query, key, value))
    arguments = dict(dropout_p=dropout_p, scale=scale, group=group, strategy=strategy)
    if group is not None:
        arguments["sharding"] = sharding
    if mask is None:
        top_left = is_causal and (group is not None or q.shape[1] != k.shape[1])
        pattern = "causal@top_left" if top_left else None
        out = attend(q, k, v, pattern=pattern, causal=is_causal and not top_left, layout="bshd", **arguments)
    else:
        with together(group):
            tokens = (q.shape[1], k.shape[1])
            if group is not None:
                tokens, arguments["sharding"] = _whole(mask, q, k, group, sharding)
            parts = lower_mask(mask, q.shape[0], q.shape[2], *tokens)
        out = attend_parts(q, k, v, parts, **arguments)
    return out.transpose(1, 2).reshape(*lead, *out.transpose(1, 2).shape[1:])


def _check(query, key, value, attn_mask, is_causal, enable_gqa):
    if is_causal and attn_mask is not None:
        raise InvalidArgument("is_causal=True and attn_mask exclude each other, as in torch; put causality into the mask")
    if not 3 <= query.dim() == key.dim() == value.dim():
        raise InvalidArgument(
            f"query, key and value have {query.dim()}, {key.dim()} and {value.dim()} dimensions; expected (..., heads, tokens, head_dim)"
        )
    if not query.shape[:-3] == key.shape[:-3] == value.shape[:-3]:
        raise Unsupported(
            f"the batch dimensions of query, key and value {tuple(query.shape[:-3])}, {tuple(key.shape[:-3])}, {tuple(value.shape[:-3])} "
            "must be equal: expand() them before the call"
        )
    if key.shape[-3] != query.shape[-3] and not enable_gqa:
        raise InvalidArgument(f"key has {key.shape[-3]} heads and query {query.shape[-3]}: pass enable_gqa=True for grouped-query attention")


def _whole(mask, q, k, group, sharding):
    """The tokens that a mask over shards is about, and the Sharding by which all ranks check that they hold just these."""
    import torch.distributed as dist

    from .._sharding import Sharding

    tokens = mask.shape[-1]
    if q.shape[1] != k.shape[1] or mask.shape[-2] not in (1, tokens):
        raise Unsupported(
            f"a mask of {mask.shape[-2]} x {tokens} over shards of {q.shape[1]} queries and {k.shape[1]} keys: over ranks masks are for "
            "self-attention, (..., tokens, tokens) or (..., 1, tokens) of all ranks; otherwise use pattern= of ringspan.torch.attention"
        )
    if isinstance(sharding, str):
        sharding = Sharding(sharding, tokens=tokens, ranks=dist.get_world_size(group))
    return (tokens, tokens), sharding


def _boolean(mask, query):
    if mask.dtype != torch.bool:
        raise Unsupported(
            f"attn_mask.dtype ({mask.dtype}) is not supported: a float mask is added to the scores. Pass a boolean mask (True: attends), "
            "or alibi_slopes= of ringspan.torch.attention for linear biases"
        )
    if mask.dim() > 4 or query.dim() > 4 and mask.dim() > 2:
        lead = query.shape[:-3]
        if tuple(mask.shape[:-3]) != tuple(lead):
            raise Unsupported(f"attn_mask of shape {tuple(mask.shape)} with batch dimensions {tuple(lead)}: expand() it to them first")
        return mask.reshape(-1, *mask.shape[-3:])
    if query.dim() == 3 and mask.dim() == 3:  # (heads, tokens_q, tokens_k)
        return mask[None]
    return mask
