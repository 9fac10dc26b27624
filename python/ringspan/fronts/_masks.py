"""From boolean masks to patterns: exact, or refused.

A row of a mask is a list of intervals of keys. Over consecutive rows an interval whose ends each stay or move on by one key per row
is one block of the pattern grammar: a rectangle, cut by a band. Prefix, padding, causal, window and block-diagonal masks are a few
blocks; a mask that needs more than MAX_BLOCKS is refused.
"""

import dataclasses

import torch

from ..errors import InvalidArgument, Unsupported
from ._call import attend

MAX_BLOCKS = 1024


@dataclasses.dataclass(frozen=True)
class Part:
    """The pattern of batch items [first, first + count). pattern None: they attend to nothing. starts, lengths: of each item, the first
    of its keys and how many there are; tensors, so that a compiled graph serves every number."""

    first: int
    count: int
    pattern: str | None
    cu_seqlens: tuple[int, ...] | None = None
    starts: torch.Tensor | None = dataclasses.field(default=None, compare=False)
    lengths: torch.Tensor | None = dataclasses.field(default=None, compare=False)


def lower_mask(mask, batch, heads, tokens_q, tokens_k):
    """Parts that cover the batch, of a boolean mask that broadcasts to (batch, heads, tokens_q, tokens_k)."""
    shape = (batch, heads, tokens_q, tokens_k)
    if mask.dim() > 4 or any(m not in (1, s) for m, s in zip(mask.shape[::-1], shape[::-1])):
        raise InvalidArgument(f"the mask has shape {tuple(mask.shape)}, which does not broadcast to (batch, heads, tokens_q, tokens_k) {shape}")
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape)).detach()
    if mask.shape[1] > 1:
        if not bool((mask[:, :1] == mask).all()):
            raise Unsupported(
                "a mask that differs between heads is not supported; call attention once per group of heads with the same mask"
            )
        mask = mask[:, :1]
    items = mask[:, 0]  # (1 or batch, 1 or tokens_q, 1 or tokens_k)
    if items.shape[0] > 1 and items.shape[1] == 1:
        keys = keys_of(items[:, 0].expand(-1, tokens_k))
        if keys is not None:
            return (Part(0, batch, "", starts=keys[0], lengths=keys[1]),)
    parts = []
    for index in range(items.shape[0]):
        if parts and bool((items[index] == items[index - 1]).all()):
            parts[-1] = dataclasses.replace(parts[-1], count=parts[-1].count + 1)
        else:
            pattern = pattern_of_blocks(blocks_of(items[index].expand(tokens_q, tokens_k)), tokens_q, tokens_k)
            parts.append(Part(index, 1, pattern))
    if len(parts) == 1:
        return (dataclasses.replace(parts[0], count=batch),)
    return tuple(parts)


def keys_of(keep):
    """(starts, lengths) of the True of each row of (batch, tokens_k), None where one has them in several runs."""
    if keep.shape[1] == 0:
        return None
    lengths = keep.sum(1)
    starts = keep.to(torch.int8).argmax(1)  # the first of the greatest
    last = keep.shape[1] - 1 - keep.flip(1).to(torch.int8).argmax(1)
    if not bool((lengths == (last - starts + 1) * (lengths > 0)).all()):
        return None
    return starts.cpu(), lengths.cpu()


def blocks_of(mask):
    """The blocks (q0, q1, k0, k1, lo, hi) of one (tokens_q, tokens_k) mask: lo <= j - i <= hi inside [q0, q1) x [k0, k1)."""
    step = torch.nn.functional.pad(mask.to(torch.int8), (1, 1)).diff(dim=1)
    begins, ends = (step == 1).nonzero(), (step == -1).nonzero()  # both by row, then by key: they match one to one
    rows, first, last = begins[:, 0].tolist(), begins[:, 1].tolist(), ends[:, 1].tolist()
    blocks, open_, row, index = [], [], -1, 0
    while index < len(rows):
        stop = index
        while stop < len(rows) and rows[stop] == rows[index]:
            stop += 1
        intervals = list(zip(first[index:stop], last[index:stop]))
        if rows[index] != row + 1 or len(intervals) != len(open_):
            blocks.extend(run.block() for run in open_)
            open_ = [_Run(rows[index], *interval) for interval in intervals]
        else:
            for n, interval in enumerate(intervals):
                if not open_[n].extend(*interval):
                    blocks.append(open_[n].block())
                    open_[n] = _Run(rows[index], *interval)
        if len(blocks) > MAX_BLOCKS:
            break
        row, index = rows[index], stop
    blocks.extend(run.block() for run in open_)
    if len(blocks) > MAX_BLOCKS:
        raise Unsupported(
            f"the mask consists of more than {MAX_BLOCKS} blocks of slices; describe it by pattern=, window=, cu_seqlens= or "
            "documents of ringspan.torch.attention, or use a pattern of dilated branches"
        )
    return blocks


class _Run:
    """An interval of keys over consecutive rows; each end stays, or moves on by one key per row."""

    def __init__(self, row, first, last):
        self.row, self.rows = row, 1
        self.first0, self.last0 = self.first, self.last = first, last
        self.slope = None

    def extend(self, first, last):
        slope = (first - self.first, last - self.last)
        if slope != (self.slope or slope) or not all(0 <= s <= 1 for s in slope):
            return False
        self.slope, self.first, self.last = slope, first, last
        self.rows += 1
        return True

    def block(self):
        down, up = self.slope or (0, 0)
        end = self.row + self.rows
        lo = self.first0 - self.row if down else self.first0 - (end - 1)
        hi = self.last0 - 1 - self.row if up else self.last - 1 - self.row
        return self.row, end, self.first0, self.last, lo, hi


def pattern_of_blocks(blocks, tokens_q, tokens_k):
    """The shortest text for the blocks; None where there are none, "" where everything is attended."""
    if not blocks:
        return None
    if len(blocks) == 1 and blocks[0][:4] == (0, tokens_q, 0, tokens_k):
        return band_pattern(tokens_q, tokens_k, blocks[0][4], blocks[0][5])
    return "block:" + ";".join(_block_text(block) for block in blocks)


def band_pattern(tokens_q, tokens_k, lo, hi, keys=None):
    """lo <= j - i <= hi (None: no bound), for keys in the intervals `keys` only (None: all)."""
    lowest, highest = -(tokens_q - 1), tokens_k - 1
    lo = lowest if lo is None else max(lo, lowest)
    hi = highest if hi is None else min(hi, highest)
    if lo > hi or (keys is not None and not keys):
        return None
    if keys is not None and list(keys) != [(0, tokens_k)]:
        return "block:" + ";".join(_block_text((0, tokens_q, first, last, lo, hi)) for first, last in keys)
    diagonal = tokens_k - tokens_q
    left, right = diagonal - lo, hi - diagonal
    if left < 0 or right < 0:
        return "block:" + _block_text((0, tokens_q, 0, tokens_k, lo, hi))
    terms = []
    if right == 0 and hi < highest:
        terms.append("causal")
    bounds = (-1 if lo == lowest else left, -1 if hi == highest or right == 0 else right)
    if bounds != (-1, -1):
        terms.append(f"window:{bounds[0]},{bounds[1]}")
    return " & ".join(terms)


def _block_text(block):
    q0, q1, k0, k1, lo, hi = block
    full = lo <= k0 - (q1 - 1) and hi >= (k1 - 1) - q0
    return f"{q0}-{q1},{k0}-{k1}" + ("" if full else f",band({lo},{hi})")


def attend_parts(q, k, v, parts, **arguments):
    """attention() with the pattern of each part of the batch; (batch, tokens, heads, dim)."""
    outputs = []
    for part in parts or (Part(0, 0, ""),):  # none: of a batch of nothing
        whole = part.first == 0 and part.count == q.shape[0]
        items = (q, k, v) if whole else tuple(t[part.first : part.first + part.count] for t in (q, k, v))
        if part.pattern is None:
            outputs.append(attend(*items, lengths=[0] * part.count, lengths_k=[0] * part.count, layout="bshd", **arguments))
            continue
        documents = None if part.cu_seqlens is None else torch.tensor(part.cu_seqlens, dtype=torch.int64, device="cpu")
        outputs.append(attend(*items, pattern=part.pattern or None, cu_seqlens=documents, starts_k=part.starts, lengths_k=part.lengths,
                              layout="bshd", **arguments))  # fmt: skip
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
