"""Padding on the left and on the right: starts_k and lengths_k, alone, over ranks, simulated, compiled; and in masks of the fronts."""

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from reference import assert_close
from reference import attention as dense
from worlds import run_ranks

import ringspan
import ringspan.torch as rt
from ringspan.fronts import _masks
from ringspan.fronts.sdpa import scaled_dot_product_attention

STARTS, LENGTHS = [0, 9, 30, 12], [30, 21, 0, 5]


def _inputs(n_q, n_k=30, dtype=torch.float32):
    torch.manual_seed(0)
    q, d_out = (torch.randn(len(STARTS), n_q, 4, 16).to(dtype) for _ in range(2))
    k, v = (torch.randn(len(STARTS), n_k, 2, 16).to(dtype) for _ in range(2))
    return q, k, v, d_out


def _mask(n_q, n_k, starts, lengths, causal, window):
    """(batch, 1, n_q, n_k): the last query stands at the last of an item's keys."""
    masks = []
    for start, length in zip(starts, lengths):
        i, j = torch.arange(n_q)[:, None], torch.arange(n_k)[None, :]
        distance = j - i - (start + length - n_q)
        mask = (j >= start) & (j < start + length) & (distance >= (-window if window else -(2**30)))
        masks.append(mask & (distance <= 0) if causal else mask)
    return torch.stack(masks)[:, None]


def _expected(q, k, v, d_out, mask):
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    o, lse = dense(*leaves, mask)
    o.backward(d_out.double())
    return o.detach(), lse.detach(), *(t.grad for t in leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", [None, "cuda-emulated"])
def test_results(dtype, device):
    for n_q in (1, 3, 30):
        for causal, window in ((True, None), (True, 4), (False, None)):
            for lengths in (LENGTHS, None):
                inputs = _inputs(n_q, dtype=dtype)
                leaves = [t.clone().requires_grad_() for t in inputs[:3]]
                o, lse = rt.attention(*leaves, causal=causal, window=window and (window, -1), starts_k=STARTS, lengths_k=lengths, return_lse=True, device=device)
                o.backward(inputs[3])
                mask = _mask(n_q, 30, STARTS, lengths or [30 - start for start in STARTS], causal, window)
                for a, e in zip((o, lse, *(t.grad for t in leaves)), _expected(*inputs, mask), strict=True):
                    assert_close(a, e, dtype, f"{n_q} queries, causal {causal}, window {window}, lengths {lengths}")


def test_what_is_padding_is_not_read():
    q, k, v, _ = _inputs(3)
    seen = _mask(3, 30, STARTS, LENGTHS, False, None)[:, 0, 0]
    expected = rt.attention(q, k, v, causal=True, starts_k=STARTS, lengths_k=LENGTHS)
    for t in (k, v):
        t[~seen] = float("nan")
    assert torch.equal(rt.attention(q, k, v, causal=True, starts_k=STARTS, lengths_k=LENGTHS), expected)


def _compare(rank, ranks):
    q, k, v, d_out = _inputs(30)
    expected = _expected(q, k, v, d_out, _mask(30, 30, STARTS, LENGTHS, True, None))
    for strategy in ("ring", "exchange", "all-gather", "ulysses", "pass-q", "local"):
        sharding = rt.Sharding("zigzag", tokens=30, ranks=ranks)
        local = [sharding.shard(t, rank=rank).requires_grad_() for t in (q, k, v)]
        o = rt.attention(*local, causal=True, starts_k=STARTS, lengths_k=LENGTHS, group=dist.group.WORLD, strategy=strategy)
        o.backward(sharding.shard(d_out, rank=rank))
        for a, e in zip((o, *(t.grad for t in local)), (expected[0], *expected[2:]), strict=True):
            assert_close(a, sharding.shard(e, rank=rank), what=strategy)
    with pytest.raises(ringspan.CommError, match=r"ranks disagree on starts_k: \[0, 9, 30, 12\] on rank 0, \[0, 9, 30, 10\] on rank 2"):
        rt.attention(*local, starts_k=[*STARTS[:3], 12 - rank], lengths_k=LENGTHS, group=dist.group.WORLD)
    return True


def test_over_ranks():
    assert all(run_ranks(3, _compare))


def _lengths_of_queries(rank, ranks):
    """Whether they are those of the keys too is decided by the tokens of all ranks."""
    group = dist.group.WORLD
    torch.manual_seed(0)
    x, keys = torch.randn(1, 7, 2, 8), torch.randn(1, 8, 2, 8)
    expected = rt.attention(x, x, x, lengths=[5])
    queries, others = rt.Sharding("contiguous", tokens=7, ranks=2), rt.Sharding("zigzag", tokens=7, ranks=2)
    local = others.shard(x, rank=rank)
    o = rt.attention(queries.shard(x, rank=rank), local, local, group=group, sharding=queries, sharding_k=others, lengths=[5])
    assert_close(queries.unshard(o, group=group), expected)
    assert_close(rt.attention(x, local, local, group=group, replicated_q=True, sharding=others, lengths=[5]), expected)
    striped = rt.Sharding("striped", tokens=8, ranks=2)
    local, few = striped.shard(keys, rank=rank), x[:, :4]  # as many as a rank has keys
    with pytest.raises(ringspan.InvalidArgument, match="lengths_k are not, and q has 4 tokens and k 8"):
        rt.attention(few, local, local, group=group, replicated_q=True, sharding=striped, lengths=[4])
    o = rt.attention(few, local, local, group=group, replicated_q=True, sharding=striped, lengths=[4], lengths_k=[8])
    assert_close(o, rt.attention(few, keys, keys))
    return True


def test_lengths_of_queries_over_ranks():
    assert all(run_ranks(2, _lengths_of_queries))


def test_one_graph_for_all_numbers():
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def model(q, k, v, starts, lengths):
        return rt.attention(q, k, v, causal=True, starts_k=starts, lengths_k=lengths) * 2.0

    compiled = torch.compile(model, fullgraph=True, backend=counted)
    q, k, v, _ = _inputs(1)
    for shift in range(4):
        starts, lengths = torch.tensor(STARTS) // 2 + shift, torch.tensor(LENGTHS) // 2
        assert torch.equal(compiled(q, k, v, starts, lengths), model(q, k, v, starts, lengths))
    torch._dynamo.reset()
    assert counted.frame_count == 1


def test_masks_of_keys_are_one_call():
    q, k, v = (t.transpose(1, 2).contiguous() for t in _inputs(7)[:3])
    keep = _mask(1, 30, STARTS, LENGTHS, False, None)
    (part,) = _masks.lower_mask(keep, 4, 4, 7, 30)
    assert (part.first, part.count, part.starts.tolist()[:2], part.lengths.tolist()) == (0, 4, STARTS[:2], LENGTHS)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, keep, enable_gqa=True)
    expected[2] = 0  # sees nothing
    assert_close(scaled_dot_product_attention(q, k, v, keep, enable_gqa=True), expected.double())
    nothing = [t[:, :, :0] for t in (k, v)]
    assert not scaled_dot_product_attention(q, *nothing, keep[..., :0], enable_gqa=True).any()
    keep[0, 0, 0, 5] = False  # two runs
    assert len(_masks.lower_mask(keep, 4, 4, 7, 30)) == 4


def test_refusals():
    q, k, v, _ = _inputs(3)
    for options, text in (
        (dict(starts_k=[0, 1]), r"starts_k has 2 entries, expected one per batch item \(4\)"),
        (dict(starts_k=[0, 0, 0, 31]), r"starts_k\[3\] \(31\) must be in \[0, 30\]"),
        (dict(starts_k=[0, 0, 0, 26], lengths_k=LENGTHS), r"starts_k\[3\] \(26\) must be in \[0, 25\], the tokens_k less lengths_k\[3\]"),
        (dict(starts_k=[0, 0, 0, 1.5]), r"starts_k\[3\] \(1.5\) must be an integer"),
        (dict(starts_k=torch.zeros(4)), "starts_k .torch.float32"),
    ):
        with pytest.raises(ringspan.InvalidArgument, match=text):
            rt.attention(q, k, v, **options)
    with pytest.raises(ringspan.InvalidArgument, match="starts_k cannot be used together with documents"):
        rt.attention(q, k, v, cu_seqlens=[0, 3], cu_seqlens_k=[0, 30], starts_k=STARTS)
