"""Which rank holds which tokens."""

import functools
from typing import NamedTuple

import numpy as np

from . import _check, _core
from .errors import InvalidArgument

KINDS = ("contiguous", "zigzag", "striped", "block_striped:SIZE", "explicit:FIRST-LAST[:STRIDE],...;...")


@functools.lru_cache(maxsize=64)
def _positions(kind, tokens, ranks, rank):
    pieces = _core.shard_pieces(kind, tokens, ranks, rank)
    parts = [np.arange(first, first + stride * count, stride, dtype=np.int64) for first, stride, count in pieces if count > 0]
    positions = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
    positions.flags.writeable = False
    return positions


def canonical(kind):
    """The canonical text of a sharding; raises InvalidArgument with what was expected."""
    if not isinstance(kind, str):
        raise InvalidArgument(f"sharding ({kind!r}) must be a name ({', '.join(KINDS)}) or a ringspan.Sharding")
    return _core.canonical_sharding(kind)


class Sharding:
    """Says which of `tokens` tokens each of `ranks` ranks holds.

    kind: "contiguous", "zigzag" (rank r holds chunks r and 2p - 1 - r of 2p: balanced for causal attention), "striped"
    (tokens r, r + p, ...), "block_striped:SIZE", or "explicit:0-99;100-199,300-399:2" (ranks separated by ';'). Any number of
    tokens and ranks goes; a rank may hold none.
    """

    def __init__(self, kind: str = "zigzag", *, tokens: int, ranks: int):
        self.kind = canonical(kind)
        self.tokens = _check.integer(tokens, "tokens", 0)
        self.ranks = _check.integer(ranks, "ranks", 1, _check.INT32)
        _core.shard_pieces(self.kind, self.tokens, self.ranks, 0)  # lists are disjoint and covering

    @classmethod
    def of_documents(cls, kind: str, cu_seqlens, *, ranks: int):
        """Each document dealt by itself, as ring-flash-attn does for packed sequences: a rank holds its part of every document."""
        offsets, ranks = _check.packed(cu_seqlens, "cu_seqlens"), _check.integer(ranks, "ranks", 1, _check.INT32)
        lists = [[] for _ in range(ranks)]
        for begin, end in zip(offsets, offsets[1:]):
            for rank in range(ranks):
                for first, stride, count in _core.shard_pieces(canonical(kind), end - begin, ranks, rank):
                    if count > 0:
                        last = begin + first + (count - 1) * stride
                        lists[rank].append(f"{begin + first}-{last}" + (f":{stride}" if stride > 1 and count > 1 else ""))
        return cls("explicit:" + ";".join(",".join(ranges) for ranges in lists), tokens=offsets[-1], ranks=ranks)

    def rows(self, rank: int) -> int:
        """How many tokens the rank holds."""
        return _core.shard_rows(self.kind, self.tokens, self.ranks, self._checked_rank(rank))

    def positions(self, rank: int) -> np.ndarray:
        """The global positions of the rank's tokens, in the order in which it stores them."""
        return _positions(self.kind, self.tokens, self.ranks, self._checked_rank(rank))

    def _checked_rank(self, rank):
        rank = _check.whole(rank, "rank")
        if not 0 <= rank < self.ranks:
            raise InvalidArgument(f"rank ({rank}) must be in [0, {self.ranks})")
        return rank

    def __repr__(self):
        return f"{type(self).__name__}({self.kind!r}, tokens={self.tokens}, ranks={self.ranks})"

    def __eq__(self, other):
        if not isinstance(other, Sharding):
            return NotImplemented
        return (self.kind, self.tokens, self.ranks) == (other.kind, other.tokens, other.ranks)

    def __hash__(self):
        return hash((self.kind, self.tokens, self.ranks))


class Dealt(NamedTuple):
    """How the tokens of q, or of k and v, are dealt. tokens, ranks: of a Sharding what it is for; -1: a name was given, which is for any."""

    kind: str
    tokens: int
    ranks: int

    @classmethod
    def of(cls, sharding, checked=canonical):
        sharding = cls.unchanging(sharding)
        return sharding if isinstance(sharding, cls) else cls(checked(sharding), -1, -1)

    @classmethod
    def unchanging(cls, sharding):
        """A Sharding as it is now; a name, which may be wrong, is left alone."""
        return cls(sharding.kind, sharding.tokens, sharding.ranks) if isinstance(sharding, Sharding) else sharding

    def mismatch(self, tokens, ranks):
        """"" where it is for so many tokens and ranks, else the beginning of a message."""
        if self.tokens < 0 or (self.tokens, self.ranks) == (tokens, ranks):
            return ""
        return f"sharding is of {self.tokens} tokens over {self.ranks} ranks"


def both_sides(sharding, sharding_k, replicated_q, checked=canonical):
    """(of q, of k and v). Queries that every rank has are dealt to none, but each has an owner, who merges what others computed for it."""
    queries = Dealt.of(sharding, checked)
    if replicated_q:
        owners = "contiguous" if queries.kind.startswith("explicit") else queries.kind
        return Dealt(owners, -1, -1), queries if sharding_k is None else Dealt.of(sharding_k, checked)
    return queries, Dealt(queries.kind, -1, -1) if sharding_k is None else Dealt.of(sharding_k, checked)
