"""Masks of Hugging Face transformers, without the n x n tensor.

transformers describes a mask as a function of (batch, head, query, key), composed of a few known ones. Those are recognised and become
a band (causal, windows) and documents (packed sequences); together with the padding of each batch item they are parts of a pattern.
Functions that are not known are evaluated, all of them or nothing: where that is too large they are refused.
"""

import dataclasses
import inspect

import torch

from ..errors import Unsupported
from ._masks import MAX_BLOCKS, Part, band_pattern, keys_of, lower_mask

_LARGEST_EVALUATION = 1 << 28  # pairs


@dataclasses.dataclass(frozen=True, eq=False)
class Structure:
    """lo <= j - i <= hi in positions of the whole sequence (None: no bound), within documents."""

    lo: int | None = None
    hi: int | None = None
    documents: torch.Tensor | None = None  # (batch, tokens): tokens with equal numbers belong together

    def __and__(self, other):
        lo = [bound for bound in (self.lo, other.lo) if bound is not None]
        hi = [bound for bound in (self.hi, other.hi) if bound is not None]
        documents = self.documents if self.documents is not None else other.documents
        return Structure(max(lo, default=None), min(hi, default=None), documents)

    @property
    def causal(self):
        return self.hi == 0

    @property
    def window(self):
        """(left, right) as attention() takes it; None without one."""
        left, right = -1 if self.lo is None else -self.lo, -1 if self.hi is None or self.causal else self.hi
        return None if (left, right) == (-1, -1) else (left, right)

    @property
    def text(self):
        """Of a pattern in which the last query stands at the last key."""
        return " & ".join((["causal"] if self.causal else []) + ([f"window:{self.window[0]},{self.window[1]}"] if self.window else []))


@dataclasses.dataclass(frozen=True)
class Sequence:
    """What the ranks of a group hold shards of. documents: offsets of packed sequences, None: one."""

    tokens: int
    documents: tuple[int, ...] | None


class _NotATensor(Unsupported, AttributeError):
    """hasattr() is answered as for any other object."""


_OWN_SCORES = (
    "this model, or a part of it, does not ask transformers' attention interface for attention: it computes scores itself, with a mask that is a "
    "tensor, which ringspan never makes; load it with attn_implementation='eager' (or 'sdpa', where the model has it)"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """What the mask function gives to every layer: structure for shards of a group, parts for whole tensors.

    generate() makes masks ahead for static caches, and treats them like 4-D tensors until they come back to the mask function. A model
    that computes scores itself treats them like tensors, too, and is told what to do."""

    ndim = 4

    batch: int
    tokens_q: int
    tokens_k: int
    structure: Structure | None
    parts: tuple[Part, ...] | None
    sequence: Sequence | None = None  # over ranks

    @property
    def shape(self):
        return (self.batch, 1, self.tokens_q, self.tokens_k)

    def contiguous(self):
        return self

    def _refuse(self, *_):
        raise Unsupported(_OWN_SCORES)

    __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __invert__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __and__ = __or__ = _refuse
    __hash__ = object.__hash__

    def __eq__(self, other):
        return self._refuse() if isinstance(other, (int, float, torch.Tensor)) else NotImplemented

    def __getattr__(self, name):
        raise _NotATensor(f"{_OWN_SCORES}; what it asked of its mask is '{name}'")

    @classmethod
    def __torch_function__(cls, *_):
        raise Unsupported(_OWN_SCORES)


def structure_of(function):
    """The Structure of a mask function of transformers.masking_utils, None where it is not made of known ones."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return None
    name = function.__qualname__
    inside = inspect.getclosurevars(function).nonlocals if function.__closure__ else {}
    if name == "causal_mask_function":
        return Structure(hi=0)
    if name == "bidirectional_mask_function":
        return Structure()
    if name == "and_masks.<locals>.and_mask":
        structures = [structure_of(f) for f in inside["mask_functions"]]
        return None if None in structures else _all(structures)
    if name == "sliding_window_overlay.<locals>.inner_mask":
        return Structure(lo=1 - int(inside["sliding_window"]))
    if name == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        return Structure(lo=-int(inside["sliding_window"]), hi=int(inside["sliding_window"]))
    if name == "packed_sequence_mask_function.<locals>.inner_mask":
        return Structure(documents=inside["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        return structure_of(inside["mask_function"])  # positions run by 1 within a document: distances stay
    return None


def _all(structures):
    result = Structure()
    for structure in structures:
        result = result & structure
    return result


def intervals(keep):
    """[first, last) of each run of True."""
    step = torch.nn.functional.pad(keep.to(torch.int8), (1, 1)).diff()
    return list(zip((step == 1).nonzero().flatten().tolist(), (step == -1).nonzero().flatten().tolist()))


def parts_of(structure, batch, tokens_q, tokens_k, shift, keep):
    """Parts for a structure: key j of the tensor stands `shift` positions before key j counted from query 0; keep (batch, tokens_k):
    keys that are not padding, None: all."""
    if structure.documents is not None:
        return _document_parts(structure, batch, tokens_q, tokens_k)
    one = _one_part(structure, batch, tokens_q, tokens_k, shift, keep)
    if one is not None:
        return (one,)
    lo, hi = (None if bound is None else bound + shift for bound in (structure.lo, structure.hi))
    if keep is None or bool(keep.all()):
        return (Part(0, batch, band_pattern(tokens_q, tokens_k, lo, hi)),)
    parts = []
    for index in range(batch):
        if index and bool((keep[index] == keep[index - 1]).all()):
            parts[-1] = dataclasses.replace(parts[-1], count=parts[-1].count + 1)
            continue
        runs = intervals(keep[index])
        if len(runs) > MAX_BLOCKS:
            raise Unsupported(f"attention_mask of batch item {index} has {len(runs)} runs of tokens; more than {MAX_BLOCKS} are not supported")
        parts.append(Part(index, 1, band_pattern(tokens_q, tokens_k, lo, hi, runs)))
    return tuple(parts)


def _one_part(structure, batch, tokens_q, tokens_k, shift, keep):
    """For the whole batch, where each item has its keys in one run, which ends where the last query stands, or begins where the first
    one does: padding on one side, and what a static cache has not filled. None otherwise, and where all keys are there."""
    filled = tokens_q + shift
    if keep is None:
        if not structure.causal or not 0 <= shift or filled >= tokens_k:
            return None
        keep = torch.ones(1, 1, dtype=torch.bool, device="cpu").expand(batch, tokens_k)
    elif bool(keep.all()):
        return None
    if structure.causal and 0 <= filled < tokens_k:
        keep = keep[:, :filled]  # what lies behind the last query is not seen
    keys = keys_of(keep)
    if keys is None:
        return None
    starts, lengths = keys
    if structure.text == "" or bool(((starts + lengths == filled) | (lengths == 0)).all()):
        return Part(0, batch, structure.text, starts=starts, lengths=lengths)
    if shift == 0 and not bool(starts.any()):
        return Part(0, batch, structure.text + "@top_left", lengths=lengths)
    return None


def _document_parts(structure, batch, tokens_q, tokens_k):
    parts = []
    for index in range(batch):
        ids = structure.documents[index]
        bounds = ((ids[1:] != ids[:-1]).nonzero().flatten() + 1).tolist()
        offsets = (0, *bounds, tokens_q)
        if parts and parts[-1].cu_seqlens == offsets:
            parts[-1] = dataclasses.replace(parts[-1], count=parts[-1].count + 1)
        else:
            parts.append(Part(index, 1, structure.text, offsets))
    return tuple(parts)


def evaluate(arguments, batch, tokens_q, tokens_k):
    """Parts of any mask function, by evaluating it."""
    from transformers.masking_utils import sdpa_mask

    if batch * tokens_q * tokens_k > _LARGEST_EVALUATION:
        raise Unsupported(
            f"a mask function that ringspan does not know ({arguments['mask_function'].__qualname__}) would have to be evaluated for "
            f"{batch} x {tokens_q} x {tokens_k} pairs; causal, sliding-window, bidirectional and packed masks need no evaluation"
        )
    mask = sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return lower_mask(mask, batch, mask.shape[1], tokens_q, tokens_k)
