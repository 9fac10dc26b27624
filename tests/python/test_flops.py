"""torch's FlopCounterMode counts the products of the pairs that a pattern has."""

import pytest
import torch
import torch.distributed as dist
from reference import dilated_counts, mask_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from worlds import run_ranks

import ringspan
import ringspan.torch as rt

TOKENS, HEADS, DIM = 48, 4, 16
BRANCHES = [(8, 1), (16, 2)]
PATTERNS = {
    "full": mask_of(TOKENS, TOKENS).sum() * HEADS,
    "causal": mask_of(TOKENS, TOKENS, causal=True).sum() * HEADS,
    "window:5,2": mask_of(TOKENS, TOKENS, window=(5, 2)).sum() * HEADS,
    "dilated:8x1,16x2": dilated_counts(TOKENS, HEADS, BRANCHES, False).sum(),
    "causal & dilated:8x1,16x2": dilated_counts(TOKENS, HEADS, BRANCHES, True).sum(),
}


def _of_pairs(pairs):
    return 4 * DIM * int(pairs), 10 * DIM * int(pairs)


def _counted(**options):
    """(forward, backward)"""
    q, k, v = (options.pop("tensors", None) or [torch.randn(1, TOKENS, HEADS, DIM, requires_grad=True) for _ in range(3)])
    counter = FlopCounterMode(display=False)
    with counter:
        rt.attention(q, k, v, **options).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    return tuple(counts[op] for op in (torch.ops.ringspan.attention_forward, torch.ops.ringspan.attention_backward))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_of_a_pattern(pattern):
    expected = _of_pairs(PATTERNS[pattern])
    assert _counted(pattern=pattern) == expected
    assert _counted(pattern=pattern, ranks=3, sharding="contiguous") == expected
    with FakeTensorMode():
        assert _counted(pattern=pattern) == expected
    on_meta = [torch.empty(1, TOKENS, HEADS, DIM, requires_grad=True, device="meta") for _ in range(3)]
    assert _counted(pattern=pattern, tensors=on_meta) == expected


def test_of_documents():
    pairs = mask_of(TOKENS, TOKENS, cu_q=[0, 7, TOKENS]).sum() * HEADS
    assert _counted(cu_seqlens=[0, 7, TOKENS]) == _of_pairs(pairs)
    with FakeTensorMode(), pytest.raises(ringspan.Unsupported, match="cu_seqlens, lengths and starts_k, whose values fake tensors do not have"):
        _counted(cu_seqlens=torch.tensor([0, 7, TOKENS]))
    nothing = [torch.zeros(0, TOKENS, HEADS, DIM, requires_grad=True)] * 3
    assert _counted(tensors=nothing) == (0, 0)


def _of_a_rank(rank, ranks):
    group, shape = dist.group.WORLD, (1, TOKENS // ranks, HEADS, DIM)
    shard = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    counted = _counted(tensors=shard, causal=True, group=group, sharding="contiguous")
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = [torch.empty(shape, requires_grad=True) for _ in range(3)]
        assert _counted(tensors=fake, causal=True, group=group, sharding="contiguous") == counted
    return counted


def test_of_the_ranks_of_a_group():
    first, last = run_ranks(2, _of_a_rank)
    assert tuple(map(sum, zip(first, last))) == _of_pairs(PATTERNS["causal"])
