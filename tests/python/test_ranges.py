"""Integers that the core does not hold, and dimensions that a tensor does not have: refused by name, value and range."""

import pytest
import torch

import ringspan
import ringspan.torch as rt

X = torch.ones(1, 9, 4, 8)
OF_32_BITS = r"must be in \[1, 2147483647\]"


def refused(text):
    return pytest.raises(ringspan.InvalidArgument, match=text)


@pytest.mark.parametrize(
    "change, text",
    [
        (dict(ranks=2**31), rf"ranks \(2147483648\) {OF_32_BITS}"),
        (dict(ranks=True), r"ranks \(True\) must be an integer of at least 1"),
        (dict(window=(2**63, 0)), r"window \(\(9223372036854775808, 0\)\) must be a pair .* < 2\^63"),
        (dict(bucket_rows=2**63), r"bucket_rows \(9223372036854775808\) must be in \[0, 9223372036854775807\]"),
        (dict(memory_budget=2**63), r"memory_budget \(9223372036854775808\) must be in \[0, 9223372036854775807\]"),
        (dict(lengths=[2**63]), r"lengths\[0\] \(9223372036854775808\) must be in"),
        (dict(cu_seqlens=[0, 2**31]), r"cu_seqlens\[1\] \(2147483648\) must be in \[0, 2147483647\]"),
        (dict(cu_seqlens=torch.tensor([0, 2**31])), r"cu_seqlens\[1\] \(2147483648\) must be in \[0, 2147483647\]"),
        (dict(cu_seqlens=[0, 9], cu_seqlens_k=[0, 2**31]), r"cu_seqlens_k\[1\] \(2147483648\) must be in \[0, 2147483647\]"),
    ],
)
def test_attention(change, text):
    with refused(text):
        rt.attention(X, X, X, **change)


@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dim", "head_dim_v", "ranks"])
def test_sizes_of_plans_of_32_bits(name):
    for value in (2**31, 2**63, 10**30):
        with refused(rf"{name} \({value}\) {OF_32_BITS}"):
            ringspan.plan(10, **{name: value})


@pytest.mark.parametrize(
    "arguments, text",
    [
        (dict(tokens=2**63), r"tokens \(9223372036854775808\) must be in \[0, 9223372036854775807\]"),
        (dict(tokens_k=2**63), r"tokens_k \(9223372036854775808\) must be in \[0, 9223372036854775807\]"),
        (dict(batch=2**63), r"batch \(9223372036854775808\) must be in \[1, 9223372036854775807\]"),
        (dict(heads=2**31 - 1), r"heads \(2147483647\) must be in \[1, 1073741824\]"),
        (dict(rank=2**31), r"rank \(2147483648\) must be in \[0, 2147483647\]"),
        (dict(threads=2**31), r"threads \(2147483648\) must be in \[1, 4096\]"),
        (dict(lengths=[2**63]), r"lengths\[0\] \(9223372036854775808\) must be in \[0, 9223372036854775807\]"),
        (dict(tile=(2**31, 16)), r"tile\[0\] \(2147483648\) must be in \[0, 2147483647\]"),
        (dict(backward_tile=(16,)), r"backward_tile \(\(16,\)\) must be a pair \(queries, keys\)"),
        (dict(tokens=2**31, ranks=8, causal=True, cu_seqlens=[0, 2**30, 2**31]), r"cu_seqlens\[2\] \(2147483648\) must be in \[0, 2147483647\]"),
        (dict(cu_seqlens=[0, -1, 10]), r"cu_seqlens\[1\] \(-1\) must be an integer of at least 0"),
        (dict(scale=10**400), r"scale must be a number below 1\.8e308"),
        (dict(scale=1e300), r"scale \(inf\) must be finite"),
        (dict(backward="no"), r"backward \('no'\) must be True or False"),
    ],
)
def test_plans(arguments, text):
    with refused(text):
        ringspan.plan(**{"tokens": 10, **arguments})


def test_packed_documents_of_all_that_offsets_hold():
    last = 2**31 - 1
    assert ringspan.plan(last, ranks=8, causal=True, cu_seqlens=[0, 2**30, last], head_dim=16).rank == 0


@pytest.mark.parametrize("kind", [ringspan.Sharding, rt.Sharding])
def test_shardings(kind):
    with refused(r"tokens \(9223372036854775808\) must be in \[0, 9223372036854775807\]"):
        kind("zigzag", tokens=2**63, ranks=2)
    with refused(rf"ranks \(2147483648\) {OF_32_BITS}"):
        kind("zigzag", tokens=8, ranks=2**31)
    with refused(r"cu_seqlens\[1\] \(2147483648\) must be in \[0, 2147483647\]"):
        kind.of_documents("zigzag", [0, 2**31], ranks=2)
    for offsets in ([], [0, 5, 3], [1, 8]):
        with refused(r"cu_seqlens \(\[.*\]\) must begin with 0 and not descend"):
            kind.of_documents("zigzag", offsets, ranks=2)
    with refused(rf"ranks \(2147483648\) {OF_32_BITS}"):
        kind.of_documents("zigzag", [0, 8], ranks=2**31)
    with refused(r"rank \(9223372036854775808\) must be in \[0, 2\)"):
        kind("zigzag", tokens=8, ranks=2).rows(2**63)


@pytest.mark.parametrize("dtype", (torch.uint8, torch.int32, torch.int64, torch.bool))
def test_labels_of_any_integers_have_room_for_those_to_ignore(dtype):
    sharding = rt.Sharding("zigzag", tokens=9, ranks=1)
    tokens = torch.arange(9).to(dtype)[None]
    labels = sharding.next_labels(tokens, rank=0, cu_seqlens=[0, 4, 9])
    expected = tokens.long().roll(-1)
    expected[:, [3, 8]] = -100
    assert labels.dtype == torch.int64 and torch.equal(labels, expected)
    with refused(r"ignore_index \(-1.5\) must be an integer"):
        sharding.next_labels(tokens, rank=0, ignore_index=-1.5)


def test_dimensions_of_sharded_tensors():
    sharding = rt.Sharding("zigzag", tokens=9, ranks=2)
    text = r"dim \(7\) must be in \[-4, 4\), for the tensor has 4 dimensions"
    with refused(text):
        sharding.shard(X, rank=0, dim=7)
    parts = [sharding.shard(X, rank=rank, dim=-3) for rank in range(2)]
    assert torch.equal(sharding.unshard(parts, dim=-3), X)
    with refused(text):
        sharding.unshard(parts, dim=7)
    with refused(text):
        sharding.next_labels(X, rank=0, dim=7)
    for offsets, text in [
        ([4, 6], r"cu_seqlens \(\[4, 6\]\) must begin with 0 and not descend"),
        ([0, 8, 4, 9], "must begin with 0 and not descend"),
        ([], r"cu_seqlens \(\[\]\) must begin with 0"),
        ([0, 4, 99], r"cu_seqlens ends at 99; it must end at the number of tokens \(9\)"),
    ]:
        with refused(text):
            sharding.next_labels(X, rank=0, cu_seqlens=offsets)
    with refused("expected a tensor with 9 tokens in dimension 1, not ndarray"):
        sharding.shard(X.numpy(), rank=0)
    with refused(r"dim \(-5\) must be in \[-4, 4\)"):
        sharding.shard(X, rank=0, dim=-5)
    with refused(r"dim \(0.5\) must be an integer"):
        sharding.shard(X, rank=0, dim=0.5)
