"""Boolean masks become patterns that say the same."""

import itertools
import re

import pytest
import torch

import dense
from ringspan import Unsupported
from ringspan.fronts import _masks


def pairs_of(pattern, n_q, n_k):
    """The mask that a text of band_pattern or pattern_of_blocks means, from the grammar's definition."""
    if pattern is None:
        return torch.zeros(n_q, n_k, dtype=torch.bool)
    i, j = torch.arange(n_q)[:, None], torch.arange(n_k)[None]
    if not pattern.startswith("block:"):
        window = re.search(r"window:(-?\d+),(-?\d+)", pattern)
        left, right = (int(x) for x in window.groups()) if window else (-1, -1)
        return dense.band(n_q, n_k, left, right, causal="causal" in pattern)
    mask = torch.zeros(n_q, n_k, dtype=torch.int)
    for text in pattern[len("block:") :].split(";"):
        q0, q1, k0, k1 = (int(x) for x in re.match(r"(\d+)-(\d+),(\d+)-(\d+)", text).groups())
        inside = (i >= q0) & (i < q1) & (j >= k0) & (j < k1)
        band = re.search(r"band\((-?\d+),(-?\d+)\)", text)
        if band:
            inside = inside & (j - i >= int(band[1])) & (j - i <= int(band[2]))
        mask += inside
    assert mask.max() <= 1, f"blocks overlap: {pattern}"
    return mask.bool()


def lowered(mask):
    return _masks.pattern_of_blocks(_masks.blocks_of(mask), *mask.shape)


@pytest.mark.parametrize("n_q, n_k", [(7, 7), (5, 9), (9, 5), (1, 6), (6, 1)])
def test_bands(n_q, n_k):
    for left, right, causal, top_left in itertools.product((-1, 0, 2), (-1, 0, 3), (False, True), (False, True)):
        mask = dense.band(n_q, n_k, left, right, causal, top_left)
        assert torch.equal(pairs_of(lowered(mask), n_q, n_k), mask), (left, right, causal, top_left)


def test_usual_masks_are_short():
    n = 12
    causal = dense.band(n, n, causal=True)
    assert lowered(causal) == "causal"
    assert lowered(torch.ones(n, n, dtype=torch.bool)) == ""
    assert lowered(torch.zeros(n, n, dtype=torch.bool)) is None
    assert lowered(torch.arange(n).expand(n, n) < 5) == "block:0-12,0-5"
    prefix = causal | (torch.arange(n)[None] < 4)
    assert len(_masks.blocks_of(prefix)) == 2
    padded = causal & (torch.arange(n)[None] >= 3)
    assert len(_masks.blocks_of(padded)) == 1
    documents = dense.packed([0, 5, 6, 12], [0, 5, 6, 12], causal=True)
    assert len(_masks.blocks_of(documents)) == 3


def test_random_masks():
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        n_q, n_k = (int(torch.randint(1, 14, (), generator=generator)) for _ in range(2))
        mask = torch.rand(n_q, n_k, generator=generator) < torch.rand((), generator=generator)
        assert torch.equal(pairs_of(lowered(mask), n_q, n_k), mask), f"seed {seed}"


def test_items_with_the_same_mask_share_a_part():
    a, b = dense.band(6, 6, causal=True), dense.band(6, 6, 1, 1)
    parts = _masks.lower_mask(torch.stack((a, a, b, a))[:, None], 4, 3, 6, 6)
    assert [(part.first, part.count) for part in parts] == [(0, 2), (2, 1), (3, 1)]
    assert _masks.lower_mask(a, 4, 3, 6, 6) == (_masks.Part(0, 4, "causal"),)


def test_band_pattern_with_keys():
    for keys in ([(0, 9)], [(2, 9)], [(0, 4), (6, 8)], []):
        keep = torch.zeros(9, dtype=torch.bool)
        for first, last in keys:
            keep[first:last] = True
        for lo, hi in itertools.product((None, -3, 2), (None, 0, 4)):
            expected = dense.band(7, 9, top_left=True) & keep
            distance = torch.arange(9)[None] - torch.arange(7)[:, None]
            if lo is not None:
                expected &= distance >= lo
            if hi is not None:
                expected &= distance <= hi
            assert torch.equal(pairs_of(_masks.band_pattern(7, 9, lo, hi, keys), 7, 9), expected), (keys, lo, hi)


def test_refusals():
    chess = (torch.arange(100)[None] + torch.arange(100)[:, None] * 2) % 3 == 0
    with pytest.raises(Unsupported, match="more than 1024 blocks"):
        _masks.lower_mask(chess, 1, 1, 100, 100)
    heads = torch.ones(1, 2, 4, 4, dtype=torch.bool)
    heads[0, 1, 0, 1] = False
    with pytest.raises(Unsupported, match="differs between heads"):
        _masks.lower_mask(heads, 1, 2, 4, 4)
    with pytest.raises(ValueError, match="does not broadcast"):
        _masks.lower_mask(torch.ones(3, 4, dtype=torch.bool), 1, 2, 4, 4)
