"""Hugging Face transformers: AttentionInterface and AttentionMaskInterface.

    from ringspan.fronts import transformers as ringspan_hf

    front = ringspan_hf.register()                              # local attention
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringspan")

Over ranks, each holding its shard of every sequence:

    front = ringspan_hf.register(group=group, sharding="zigzag")
    loss = model(**front.shard(input_ids, labels)).loss         # this rank's share: sum losses and gradients over the group

Both interfaces are registered: without the second one transformers passes no mask, and causality and padding are lost. Padding on either
side, sliding windows, packed sequences (position_ids), soft caps and sinks are understood, the n x n mask is never made; what is not
understood raises. A padding token's query sees what is left of its keys, or nothing, and then gives 0.
"""

import torch
import torch.distributed as dist

from ..errors import InvalidArgument, Unsupported
from ..torch._group import meet
from . import _hf_masks
from ._call import attend, check_offsets, refuse, together
from ._hf_masks import Mask, Sequence, Structure
from ._masks import Part, attend_parts, lower_mask

# What models hand down and attention has no use for.
_HARMLESS = {
    "use_cache", "cache_position", "output_hidden_states", "return_dict", "num_items_in_batch", "logits_to_keep", "labels", "shift_labels",
    "output_router_logits", "position_embeddings", "deterministic", "max_length_q", "max_length_k", "past_key_values", "layer_idx",
}  # fmt: skip

# Kinds of layers (config.layer_types, layers_block_type) in which nothing but attention mixes tokens.
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "window_attention", "attention", "dense", "sparse", "moe"}

_registered = {}


class Front:
    """What is registered under one name. `documents` holds the offsets of packed sequences over all tokens, None: one sequence."""

    def __init__(self, group, sharding, strategy):
        self.group, self.strategy = group, strategy
        self._sharding = sharding
        self._tokens = None  # of the whole sequence, in the current forward
        self.documents = None

    def sharding(self, tokens=None):
        """The Sharding of the sequences, of `tokens` tokens, or as in the latest forward."""
        from ..torch import Sharding

        if not isinstance(self._sharding, str):
            return self._sharding
        tokens = self._tokens if tokens is None else tokens
        if tokens is None:
            raise InvalidArgument("the number of tokens is not known before the first forward; pass tokens=")
        return Sharding(self._sharding, tokens=tokens, ranks=dist.get_world_size(self.group))

    def shard(self, input_ids, labels=None, *, attention_mask=None, cu_seqlens=None, ignore_index=-100):
        """The arguments of model(...) for this rank, from whole sequences (batch, tokens): input_ids, position_ids, and with labels
        (not shifted, as transformers wants them) the labels shifted across ranks and the number of them in the batch.

        The loss of a rank is then its share: the sum over the group is the mean over all tokens, and gradients are to be summed.
        cu_seqlens: packed sequences; positions start anew in each."""
        self._need_group("shard")
        if cu_seqlens is not None:
            self.documents = tuple(check_offsets("cu_seqlens", cu_seqlens, input_ids.shape[1], None, None))
        else:
            self.documents = None
        sharding, rank = self.sharding(input_ids.shape[1]), dist.get_rank(self.group)
        positions = self._positions(sharding, self.documents).to(input_ids.device)
        result = {"input_ids": sharding.shard(input_ids, rank=rank), "position_ids": positions.expand(input_ids.shape[0], -1)}
        if attention_mask is not None:
            result["attention_mask"] = sharding.shard(attention_mask, rank=rank)
        if labels is not None:
            following = torch.full_like(labels, ignore_index)
            following[:, :-1] = labels[:, 1:]
            if self.documents is not None:
                following[:, [offset - 1 for offset in self.documents[1:]]] = ignore_index
            result["labels"] = sharding.shard(labels, rank=rank)
            result["shift_labels"] = sharding.shard(following, rank=rank)
            result["num_items_in_batch"] = (following != ignore_index).sum()
        return result

    def _need_group(self, name):
        if self.group is None:
            raise InvalidArgument(f"{name}() needs ranks: register(group=...)")

    def _positions(self, sharding, documents):
        """The positions, each within its sequence, of this rank's tokens."""
        positions = sharding.positions(dist.get_rank(self.group))
        if documents is not None:
            offsets = torch.tensor(documents, device=positions.device)
            positions = positions - offsets[torch.searchsorted(offsets, positions, right=True) - 1]
        return positions

    # ---- AttentionMaskInterface ----

    def mask(self, batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, **arguments):
        """A Mask; see transformers.masking_utils.sdpa_mask for the arguments."""
        from transformers.masking_utils import causal_mask_function

        if isinstance(attention_mask, Mask):
            return attention_mask
        if self.group is None and attention_mask is None and mask_function is causal_mask_function and q_length == kv_length:
            if isinstance(q_offset, int) and q_offset == kv_offset:  # what torch.compile can trace
                return Mask(batch_size, q_length, kv_length, Structure(hi=0), (Part(0, batch_size, "causal"),))
        return self._mask(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function or causal_mask_function, attention_mask, arguments)

    @torch.compiler.disable  # looks into functions and tensors
    def _mask(self, batch, q_length, kv_length, q_offset, kv_offset, function, attention_mask, arguments):
        if self.group is not None:
            with together(self.group):
                structure = _hf_masks.structure_of(function)
                problem = self._shard_problem(q_length, kv_length, int(q_offset), structure, function, arguments.get("config"))
                if problem is not None:
                    raise Unsupported(problem)
            return self._shard_mask(batch, q_length, structure, attention_mask)
        structure = _hf_masks.structure_of(function)
        q_offset, kv_offset, keep = int(q_offset), int(kv_offset), None
        if attention_mask is not None:
            keep = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
            keep = torch.nn.functional.pad(keep, (0, kv_length - keep.shape[1]))
        aligned = q_length == kv_length and q_offset == kv_offset
        if structure is not None and (structure.documents is None or aligned and keep is None):
            parts = _hf_masks.parts_of(structure, batch, q_length, kv_length, q_offset - kv_offset, keep)
        else:
            arguments = dict(arguments, batch_size=batch, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
                             mask_function=function, attention_mask=attention_mask)  # fmt: skip
            parts = _hf_masks.evaluate(arguments, batch, q_length, kv_length)
        return Mask(batch, q_length, kv_length, structure, parts)

    @staticmethod
    def _shard_problem(q_length, kv_length, q_offset, structure, function, config):
        kinds = [*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())]
        others = sorted(set(kinds) - _ATTENTION_LAYERS)
        if others:
            return f"layers of kind {', '.join(others)} mix tokens outside of attention, of which a rank has its shard only; they are not supported over ranks"
        if getattr(config, "output_router_logits", False):
            return "output_router_logits=True: the loss of the router is no sum over ranks; switch it off"
        if structure is None:
            return f"the mask function {getattr(function, '__qualname__', function)} is not supported over ranks; causal, sliding-window and bidirectional are"
        if q_length != kv_length or q_offset:
            return f"{q_length} queries after {q_offset} cached tokens: a KV cache is not supported over ranks; pass use_cache=False"
        return None

    def _shard_mask(self, batch, tokens_q, structure, attention_mask):
        """Collective: the ranks learn the number of all tokens."""
        parts, documents = None, self.documents
        given, of = "without" if attention_mask is None else "with", "" if documents is None else " of packed sequences"
        self._tokens = sum(meet(self.group, f"a mask {given} attention_mask{of}", tokens_q))
        if attention_mask is not None:
            keep = self.sharding().unshard(attention_mask.to(torch.uint8), group=self.group).to(torch.bool)
            if not bool(keep.all()):
                if documents is not None:
                    raise Unsupported("padding together with packed sequences is not supported; make the padding a sequence of its own")
                parts = _hf_masks.parts_of(_hf_masks.Structure(structure.lo, structure.hi), batch, self._tokens, self._tokens, 0, keep)
        return Mask(batch, tokens_q, tokens_q, structure, parts, Sequence(self._tokens, documents))

    # ---- AttentionInterface ----

    def attention(self, module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, sliding_window=None,
                  softcap=None, s_aux=None, position_ids=None, cu_seq_lens_q=None, cu_seq_lens_k=None, **unknown):  # fmt: skip
        """query, key, value (batch, heads, tokens, head_dim) -> (batch, tokens, heads, head_dim), None."""
        with together(self.group):
            _check_unknown(unknown)
            if self.group is not None and unknown.get("output_router_logits"):
                refuse("output_router_logits", True, "the loss of the router is no sum over ranks; switch it off")
            arguments = dict(dropout_p=float(dropout), scale=scaling, softcap=float(softcap or 0.0), sinks=s_aux)
            q, k, v = (t.transpose(1, 2) for t in (query, key, value))
            causal = getattr(module, "is_causal", True) if is_causal is None else bool(is_causal)
            if isinstance(attention_mask, Mask):
                _check_mask(attention_mask, q, k, sliding_window, is_causal)
            if self.group is None:
                pattern = self._local(attention_mask, q, k, causal, sliding_window, cu_seq_lens_q, cu_seq_lens_k)
            else:
                pattern, sharding = self._over_ranks(attention_mask, position_ids, cu_seq_lens_q)
                arguments.update(group=self.group, sharding=sharding, strategy=self.strategy)
        if isinstance(pattern, tuple):
            return attend_parts(q, k, v, pattern, **arguments), None
        return attend(q, k, v, layout="bshd", **pattern, **arguments), None

    def _local(self, mask, q, k, causal, sliding_window, cu_q, cu_k):
        """Parts, or the arguments of attention()."""
        if cu_q is not None and mask is not None:
            return self._packed(mask, q, k, cu_q, cu_k)
        if isinstance(mask, Mask):
            return mask.parts
        if isinstance(mask, torch.Tensor):
            if mask.dtype != torch.bool:
                raise Unsupported(f"attention_mask of {mask.dtype} {tuple(mask.shape)} is added to the scores; pass a boolean 4-D mask, or a 2-D one")
            if mask.dim() != 4:
                raise Unsupported(f"attention_mask reached attention with shape {tuple(mask.shape)}; register the mask function too (register() does)")
            return lower_mask(mask[..., : k.shape[1]], q.shape[0], q.shape[2], q.shape[1], k.shape[1])
        if mask is not None:
            raise Unsupported(f"attention_mask of type {type(mask).__name__} is not supported; pass a boolean tensor, or none")
        window = None if sliding_window is None else (int(sliding_window) - 1, 0 if causal else int(sliding_window) - 1)
        if cu_q is not None:
            return dict(causal=causal, window=window, **_documents(cu_q, cu_k, q, k))
        if causal and q.shape[1] not in (1, k.shape[1]):
            raise Unsupported(f"{q.shape[1]} queries and {k.shape[1]} keys without a mask: which keys come first is not known; "
                              "the model must create its masks with transformers.masking_utils")  # fmt: skip
        return dict(causal=causal, window=window)

    def _packed(self, mask, q, k, cu_q, cu_k):
        """Documents by cu_seq_lens_q, which the mask does not know, or knows by position_ids."""
        known = mask.structure if isinstance(mask, Mask) else None
        offsets = tuple(cu_q.tolist())
        if known is not None and known.documents is not None:
            if all(part.cu_seqlens == offsets for part in mask.parts) and (cu_k is None or tuple(cu_k.tolist()) == offsets):
                return mask.parts
            raise InvalidArgument(f"cu_seq_lens_q ({offsets}) are other sequences than those of position_ids ({mask.parts[0].cu_seqlens})")
        plain = () if known is None else _hf_masks.parts_of(known, mask.batch, mask.tokens_q, mask.tokens_k, 0, None)
        if known is None or mask.parts != plain or any(part.lengths is not None for part in mask.parts):
            raise Unsupported("cu_seq_lens_q together with padding, a KV cache or a mask of your own is not supported; make the padding a sequence of its own")
        return dict(causal=known.causal, window=known.window, **_documents(cu_q, cu_k, q, k))

    def _over_ranks(self, mask, position_ids, cu_q):
        """Parts, or the arguments of attention(), and the Sharding. By the mask alone: a layer that is computed again in backward has that
        of its forward, while the latest one may be another."""
        if mask is not None and not isinstance(mask, Mask):
            raise Unsupported(f"attention_mask of type {type(mask).__name__} is not supported over ranks; pass a 2-D padding mask of this rank's tokens")
        if cu_q is not None:
            raise Unsupported("cu_seq_lens_q is not supported over ranks; give cu_seqlens of all tokens to shard(), or set documents")
        if mask is None or mask.sequence is None:
            raise Unsupported("the model made no mask over ranks, so the number of tokens of all ranks is not known; it must use transformers.masking_utils")
        documents = mask.sequence.documents
        sharding = self.sharding(mask.sequence.tokens)
        if position_ids is not None:
            expected = self._positions(sharding, documents)
            if position_ids.dim() != 2 or not bool((position_ids == expected.to(position_ids.device)).all()):
                raise InvalidArgument(
                    f"position_ids are not the positions of this rank's tokens under {sharding!r}"
                    f"{'' if documents is None else ' within the packed sequences'}: take them from shard() or sharding().positions(rank); "
                    "generate() is not supported over ranks"
                )
        if mask.parts is not None:
            return mask.parts, sharding
        offsets = None if documents is None else torch.tensor(documents, dtype=torch.int64, device="cpu")
        return dict(causal=mask.structure.causal, window=mask.structure.window, cu_seqlens=offsets), sharding


def _documents(cu_q, cu_k, q, k):
    if q.shape[0] != 1:
        raise InvalidArgument(f"cu_seq_lens_q with a batch of {q.shape[0]}: packed sequences are one row")
    return dict(cu_seqlens=cu_q.to(torch.int64), cu_seqlens_k=None if cu_k is None else cu_k.to(torch.int64))


def _check_unknown(unknown):
    if unknown.get("output_attentions"):
        refuse("output_attentions", True, "probabilities are never formed; use attn_implementation='eager'")
    for name, value in unknown.items():
        if value is None or value is False or name in _HARMLESS:
            continue
        raise Unsupported(f"the model passes '{name}' to attention, which ringspan does not know and will not ignore; use attn_implementation='eager'")


def _check_mask(mask, q, k, sliding_window, is_causal):
    if (mask.batch, mask.tokens_q, mask.tokens_k) != (q.shape[0], q.shape[1], k.shape[1]):
        raise InvalidArgument(f"the mask is for (batch, queries, keys) {(mask.batch, mask.tokens_q, mask.tokens_k)}, but attention got "
                              f"{(q.shape[0], q.shape[1], k.shape[1])}")  # fmt: skip
    if mask.structure is None:
        return
    if is_causal is False and mask.structure.causal:
        raise InvalidArgument("is_causal=False with a causal mask; set config.is_causal = False, which changes both")
    if sliding_window is not None and mask.structure.lo is None:
        raise InvalidArgument(f"a layer with sliding_window ({sliding_window}) got a mask without a window")


def register(name="ringspan", *, group=None, sharding="zigzag", strategy="auto"):
    """Makes attn_implementation=name available, in both interfaces. group: q, k, v are shards of its ranks, dealt as `sharding`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if group is not None:
        from ..torch._transport import group_of

        group = group_of(group)
    front = Front(group, sharding, strategy)
    AttentionInterface.register(name, front.attention)
    AttentionMaskInterface.register(name, front.mask)
    _registered[name] = front
    return front


# ---- ring-flash-attention's adapter ----

_FLASH = "flash_attention_2"


def substitute_flash_attention(group, heads_k_stride):
    if not isinstance(heads_k_stride, int) or heads_k_stride < 1:
        raise InvalidArgument(f"heads_k_stride ({heads_k_stride!r}) must be a positive integer")
    register(_FLASH, group=group, sharding="contiguous")


def _substituted():
    if _FLASH not in _registered:
        raise InvalidArgument("call substitute_hf_flash_attn first")
    return _registered[_FLASH]


def update_documents(cu_seqlens, group):
    front = _substituted()
    offsets = tuple(check_offsets("cu_seqlens", cu_seqlens, None, None, None))
    ranks = dist.get_world_size(group)
    if offsets[-1] % ranks:
        raise InvalidArgument(f"cu_seqlens ends at {offsets[-1]}, which the number of ranks ({ranks}) must divide")
    front.documents = offsets


def use_ring(flag):
    from transformers import AttentionInterface, AttentionMaskInterface

    front = _substituted() if flag else Front(None, "contiguous", "auto")
    AttentionInterface.register(_FLASH, front.attention)
    AttentionMaskInterface.register(_FLASH, front.mask)
