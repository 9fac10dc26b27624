"""What the worker asks of a peer. Everything but call() is outside the timing."""

import torch


class NotOffered(Exception):
    """The peer has no argument for what the case asks."""


class Adapter:
    options = frozenset()  # of Case.options, which it can pass on
    gqa = True
    value_dim = True  # v may be narrower than k
    compiles = False  # its first call with a shape compiles

    def __init__(self, case, rank, ranks):
        self.case, self.rank, self.ranks = case, rank, ranks
        for name in case.options:
            if name not in self.options:
                raise NotOffered(f"no argument for {name}")
        if case.heads != case.kv_heads and not self.gqa:
            raise NotOffered("one number of heads for q, k and v")
        if case.head_dim != case.value_dim and not self.value_dim:
            raise NotOffered("one head_dim for q, k and v")
        self.padded = case.tokens  # tokens with the zeros that the peer wants behind them
        self.setup()

    @staticmethod
    def before_group(case):
        """Before the process group is there."""

    def setup(self):
        """Imports the peer, makes its modules and masks."""

    def positions(self):
        """Global positions of this rank's rows, in their order."""
        return torch.arange(self.padded).chunk(self.ranks)[self.rank]

    def prepare(self, t):
        """From (1, rows, heads, dim) to the peer's layout."""
        return t.contiguous()

    def call(self, q, k, v):
        raise NotImplementedError

    def restore(self, o):
        """From the peer's layout to (1, rows, heads, dim)."""
        return o

    # For peers that take a mask of rows and keys at these positions.
    def allowed(self, rows, keys):
        """(rows, keys) booleans, or None where all is allowed."""
        i, j = rows[:, None], keys[None, :]
        mask = torch.ones(len(rows), len(keys), dtype=torch.bool)
        if self.case.causal:
            mask &= j <= i
        if "padding" in self.case.options:
            mask &= j >= self.case.options["padding"]
        if "window" in self.case.options:
            left, right = self.case.options["window"]
            mask &= (j >= i - left) & (j <= i + right)
        if self.padded > self.case.tokens:
            mask &= j < self.case.tokens
        return None if mask.all() else mask


def zigzag(tokens, rank, ranks):
    """Chunks r and 2p - 1 - r of 2p."""
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


class HeadsInTurns(Adapter):
    """For peers whose query head i reads kv head i mod kv_heads, where Llama and flash-attn have i // (heads / kv_heads): query heads are
    put into that order outside the timing, unless the option "head_order" is "llama"."""

    def _reordered(self, t, heads_dim, groups):
        if self.case.heads == self.case.kv_heads or t.shape[heads_dim] != self.case.heads or self.case.options.get("head_order") == "llama":
            return t
        return t.unflatten(heads_dim, groups).transpose(heads_dim, heads_dim + 1).flatten(heads_dim, heads_dim + 1)

    def prepare(self, t):
        return self._reordered(t, 2, (self.case.kv_heads, -1)).contiguous()

    def restore(self, o):
        return self._reordered(o, 2, (-1, self.case.kv_heads))
