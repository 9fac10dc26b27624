"""LongNet modules that are given what is wrong: the message, and on ranks that all raise and go on together."""

import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from worlds import run_ranks  # noqa: E402

from ringspan import InvalidArgument, UnknownArgument  # noqa: E402
from ringspan.longnet import Branches, DilatedAttention, LongNetBlock, MultiheadDilatedAttention, geometric, rotary  # noqa: E402
from ringspan.torch import Sharding  # noqa: E402

X, Q = torch.ones(1, 8, 32), torch.ones(2, 8, 4, 6)


@pytest.mark.parametrize(
    ("make", "message"),
    (
        (lambda: Branches((16, 32), (1,)), r"len\(segment_lengths\) \(2\) must equal len\(dilation_rates\) \(1\)"),
        (lambda: Branches((16,), (0,)), r"dilation_rates\[0\] \(0\) must be an integer of at least 1"),
        (lambda: DilatedAttention((), ()), r"segment_lengths \(\(\)\) must have at least one integer"),
        (lambda: DilatedAttention((8,), (1,), dialect="mine"), r"dialect \('mine'\) must be one of longnet, torchscale, head_groups"),
        (lambda: DilatedAttention(16, 1), r"segment_lengths \(16\) must be a list of integers"),
        (lambda: DilatedAttention((8,), (1,), None, -1), r"attention_dropout \(-1.0\) must be in \[0, 1\)"),
        (lambda: DilatedAttention((8,), (1,))(Q, Q, Q, "no"), r"is_causal \('no'\) must be True or False"),
        (lambda: Branches((8,), (1,)).pattern("no"), r"causal \('no'\) must be True or False"),
        (lambda: geometric(512, 4), r"give count \(None\) or tokens \(None\)"),
        (lambda: geometric(512, 1, 3), r"ratio \(1\) must be an integer of at least 2"),
        (lambda: MultiheadDilatedAttention(30, 4, (1,), (8,)), r"embed_dim \(30\) must be divisible by num_heads \(4\)"),
        (lambda: MultiheadDilatedAttention(32, 4, (1,), (8,), num_kv_heads=3), r"num_heads \(4\) must be divisible by num_kv_heads \(3\)"),
        (lambda: MultiheadDilatedAttention(12, 4, (1,), (8,), rope_base=1e4), r"head_dim .* = 3\) must be even"),
        (lambda: MultiheadDilatedAttention(0, 4, (1,), (8,)), r"embed_dim \(0\) must be an integer of at least 1"),
        (lambda: MultiheadDilatedAttention(32, "4", (1,), (8,)), r"num_heads \('4'\) must be an integer of at least 1"),
        (lambda: MultiheadDilatedAttention(32, 4, (1,), (8,), num_kv_heads=0), r"num_kv_heads \(0\) must be an integer of at least 1"),
        (lambda: LongNetBlock(32, 4, (8,), (1,), dropout="x"), r"dropout \('x'\) must be a number"),
        (lambda: LongNetBlock(32, 4, (8,), (1,), rope_base=0.0), r"rope_base \(0.0\) must be positive"),
        (lambda: LongNetBlock(32, 4, (8,), (1,), rope_base=math.nan), r"rope_base \(nan\) must be positive"),
        (lambda: LongNetBlock(32, 4, (8,), (1,), rope_base="1e4"), r"rope_base \('1e4'\) must be a number"),
        (lambda: LongNetBlock(32, 4, (8,), (1,))(torch.ones(8, 32)), r"x has shape \(8, 32\); expected \(batch, tokens, embed_dim = 32\)"),
        (lambda: LongNetBlock(32, 4, (8,), (1,))(X, positions=torch.arange(3)), r"positions have shape \(3,\); expected \(8,\) or \(1, 8\)"),
        (lambda: MultiheadDilatedAttention(32, 4, (1,), (8,))(X, torch.ones(1, 8, 3)), r"key has shape \(1, 8, 3\); expected"),
        (lambda: MultiheadDilatedAttention(32, 4, (1,), (8,))(X, positions=torch.arange(8)), r"nothing is rotated"),
        (lambda: rotary(Q, torch.ones(4, 8)), r"positions have shape \(4, 8\); expected \(8,\) or \(2, 8\)"),
        (lambda: rotary(Q, torch.tensor(1)), r"positions have shape \(\); expected \(8,\)"),
        (lambda: rotary(Q, [[0], [1, 2]]), r"positions \(list\) must be a tensor of numbers"),
        (lambda: rotary(Q, torch.ones(8, dtype=torch.bool)), r"positions \(torch.bool\) must be numbers"),
        (lambda: rotary(Q[0], torch.arange(8)), r"x \(torch.float32 of shape \(8, 4, 6\)\) must be a tensor of floats"),
        (lambda: rotary(Q.long(), torch.arange(8)), r"x \(torch.int64 of shape"),
        (lambda: rotary(Q, torch.arange(8), -1.0), r"base \(-1.0\) must be positive"),
        (lambda: DilatedAttention((8,), (1,), segments=3)(Q, Q, Q), r"attention\(\) has no argument 'segments'"),
    ),
)
def test_errors(make, message):
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_integers_of_numpy_are_integers():
    lengths, rates = np.array([16, 32]), np.array([1, 2])
    assert str(DilatedAttention(lengths, rates).branches) == "16x1, 32x2"
    assert geometric(np.int64(16), np.int64(2), np.int64(2)) == Branches(lengths, rates)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DilatedAttention((8,), (1,), foo=3), "no argument 'foo'"),
        (lambda: DilatedAttention((8,), (1,), pattern="full"), "'pattern' cannot be given here: it follows from segment_lengths"),
        (lambda: DilatedAttention((8,), (1,), dropout_p=0.1), "'dropout_p' cannot be given here: it is attention_dropout="),
        (lambda: LongNetBlock(32, 4, (8,), (1,), pattern="full"), "'pattern' cannot be given here"),
        (lambda: DilatedAttention((8,), (1,), causal=True), "'causal' cannot be given here: it is is_causal= of the call"),
        (lambda: DilatedAttention((8,), (1,), scale=0.5), "'scale' cannot be given here: it is softmax_scale= here"),
        (lambda: LongNetBlock(32, 4, (8,), (1,))(X, causal=False), "'causal' cannot be given here: it is is_causal= of the call"),
        (lambda: LongNetBlock(32, 4, (8,), (1,), layer_norm=False), "'layer_norm' cannot be given here: the block has MAGNETO's norms"),
        (lambda: LongNetBlock(32, 4, (8,), (1,), attention_dropout=0.1), "'attention_dropout' cannot be given here: it is dropout= here"),
        (lambda: LongNetBlock(32, 4, (8,), (1,), layout="bhsd"), "'layout' cannot be given here: x is"),
        (lambda: LongNetBlock(32, 4, (8,), (1,), return_lse=True), "'return_lse' cannot be given here: the layer gives"),
        (lambda: LongNetBlock(32, 4, (8,), (1,))(X, return_lse=True), "'return_lse' cannot be given here"),
        (lambda: LongNetBlock(32, 4, (8,), (1,))(X, pattern="full"), "'pattern' cannot be given here"),
        (lambda: MultiheadDilatedAttention(32, 4, (1,), (8,))(X, layout="bhsd"), "'layout' cannot be given here"),
        (lambda: MultiheadDilatedAttention(32, 4, (1,), (8,))(X, key_padding_mask=None), "give lengths="),
    ],
)
def test_arguments_that_are_none_of_attention(make, message):
    with pytest.raises(UnknownArgument, match=message):
        make()


def _mistakes(rank, ranks):
    """Rank 1 makes one mistake after another; the others hear of each, and the group goes on."""
    group, sharding = dist.group.WORLD, Sharding("zigzag", tokens=32, ranks=ranks)
    options = {"group": group, "sharding": sharding}
    plain = DilatedAttention((8,), (1,), **options)
    layer = MultiheadDilatedAttention(32, 4, (1,), (8,), **options)
    rotated = LongNetBlock(32, 4, (8,), (1,), **options)
    by_name = LongNetBlock(32, 4, (8,), (1,), group=group)
    rows, wrong = sharding.rows(rank), rank == 1
    x, q = torch.ones(1, rows, 32), torch.ones(1, rows, 4, 8)
    positions = sharding.positions(rank)
    calls = [
        lambda: rotated(x[:, 1:] if wrong else x),
        lambda: rotated(x[..., 1:] if wrong else x),
        lambda: rotated(x.double() if wrong else x),
        lambda: rotated(x, positions=positions[1:] if wrong else positions),
        lambda: rotated(x, **({"sharding": Sharding("zigzag", tokens=32, ranks=ranks + 1)} if wrong else {})),
        lambda: by_name(x, positions=None if wrong else positions),
        lambda: layer(x, positions=positions if wrong else None),
        lambda: layer(x, return_lse=True) if wrong else layer(x),
        lambda: layer(x, is_causal="no" if wrong else False),
        lambda: plain(q, q, q, **({"pattern": "full"} if wrong else {})),
        lambda: plain(q, q, q, **({"ranks": 2} if wrong else {})),
    ]
    texts = []
    for call in calls:
        with pytest.raises(Exception) as caught:
            call()
        texts.append(str(caught.value))
        assert rotated(x).shape == x.shape
    return texts


def test_a_mistake_of_one_rank_is_that_of_all():
    others, own = run_ranks(2, _mistakes)
    own = [text.removeprefix("rank 1/2: ") for text in own]
    for other, text in zip(others, own, strict=True):
        assert other.startswith("rank 0/2: on rank 1: ") and other.endswith(text), (other, text)
    for text, begin in zip(own, (
        "Sharding('zigzag', tokens=32, ranks=2) deals 16 tokens to rank 1, which has 15", "x has shape (1, 16, 31); expected",
        "", "positions have shape (15,); expected (16,) or (1, 16)", "the group has 2 ranks, but the sharding 3", "positions are needed",
        "positions are given, but nothing is rotated", "'return_lse' cannot be given here", "is_causal ('no') must be", "'pattern' cannot",
        "give group (processes) or ranks",
    ), strict=True):  # fmt: skip
        assert text.startswith(begin), text
