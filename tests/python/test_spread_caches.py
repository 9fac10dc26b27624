"""Queries that every rank has, and keys dealt in another way than queries: results are those of one rank."""

import os

import pytest
import torch
import torch.distributed as dist
from reference import assert_close, mask_of
from reference import attention as dense
from worlds import run_ranks, try_ranks

import ringspan
import ringspan.torch as rt

STRATEGIES = ["auto", "ring", "exchange", "all-gather", "ulysses", "pass-q", "local"]


def _whole(n_q, n_k, dtype=torch.float32):
    torch.manual_seed(0)
    q, d_out = (torch.randn(2, n_q, 4, 16).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, n_k, 2, 16).to(dtype) for _ in range(2))
    return q, k, v, d_out


def _expected(q, k, v, d_out, window):
    """o, lse, dq, dk, dv in float64."""
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    o, lse = dense(*leaves, mask_of(q.shape[1], k.shape[1], causal=True, window=window))
    o.backward(d_out.double())
    return o.detach(), lse.detach(), *(t.grad for t in leaves)


def _compare(rank, ranks, cases):
    for n_q, n_k, dtype, kind_q, kind_k, options in cases:
        what = f"{n_q} queries {kind_q or 'on every rank'}, {n_k} keys {kind_k}, {dtype}, {options}"
        q, k, v, d_out = _whole(n_q, n_k, dtype)
        keys = rt.Sharding(kind_k, tokens=n_k, ranks=ranks)
        queries = rt.Sharding(kind_q or "contiguous", tokens=n_q, ranks=ranks)
        mine = (lambda t, dim=1: t) if kind_q is None else lambda t, dim=1: queries.shard(t, rank=rank, dim=dim)
        dealt = dict(sharding=keys, replicated_q=True) if kind_q is None else dict(sharding=queries, sharding_k=keys)
        options = dict(options, causal=True, return_lse=True)
        local = [mine(q).clone().requires_grad_(), *(keys.shard(t, rank=rank).requires_grad_() for t in (k, v))]
        o, lse = rt.attention(*local, group=dist.group.WORLD, **dealt, **options)
        o.backward(mine(d_out))
        simulated = [t.clone().requires_grad_() for t in (q, k, v)]
        o_simulated, lse_simulated = rt.attention(*simulated, ranks=ranks, **dealt, **options)
        o_simulated.backward(d_out)
        assert torch.equal(o, mine(o_simulated.detach())) and torch.equal(lse, mine(lse_simulated.detach(), 2)), what
        expected = _expected(q, k, v, d_out, options.get("window"))
        assert_close(o, mine(expected[0]), dtype, what)
        assert_close(lse, mine(expected[1], 2), dtype, what)
        gradients = [mine(expected[2]), *(keys.shard(t, rank=rank) for t in expected[3:])]
        of_simulated = [mine(simulated[0].grad), *(keys.shard(t.grad, rank=rank) for t in simulated[1:])]
        for t, e, s in zip(local, gradients, of_simulated, strict=True):
            assert torch.equal(t.grad, s), what
            assert_close(t.grad, e, dtype, what)
    return True


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_are_those_of_one_rank(ranks):
    lists = ";".join(f"{r}-40:{ranks}" for r in reversed(range(ranks)))  # every ranks-th key, the ranks in reverse
    cases = [(7, 41, torch.float32, None, "striped", dict(strategy=s)) for s in STRATEGIES]
    cases += [(1, 41, dtype, None, "explicit:" + lists, {}) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    cases += [(41, 41, torch.bfloat16, None, "zigzag", dict(strategy=s, window=(9, 0))) for s in ("ring", "pass-q")]
    cases += [(13, 41, torch.float32, "zigzag", "block_striped:4", dict(strategy=s)) for s in STRATEGIES]
    cases += [(41, 41, torch.bfloat16, "contiguous", "explicit:" + lists, {})]
    run_ranks(ranks, _compare, cases)


def _decode(rank, ranks, dtype):
    """A cache that grows where it is, striped: the next token belongs to rank t % p. Every rank goes on with the same output."""
    torch.manual_seed(0)
    steps = [torch.randn(3, 1, 1, 4, 16).to(dtype) for _ in range(9)]
    cache = [torch.empty(1, 0, 4, 16, dtype=dtype) for _ in range(2)]
    outputs = []
    for step, (q, k, v) in enumerate(steps):
        if step % ranks == rank:
            cache = [torch.cat((old, new), 1) for old, new in zip(cache, (k, v))]
        outputs.append(rt.attention(q, *cache, group=dist.group.WORLD, replicated_q=True, sharding="striped"))
    k, v = (torch.cat([step[i] for step in steps], 1) for i in (1, 2))
    for step, o in enumerate(outputs):
        assert_close(o, dense(steps[step][0], k[:, : step + 1], v[:, : step + 1])[0], dtype, f"step {step}")
    return torch.stack(outputs).float().numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding(dtype):
    assert len(set(run_ranks(3, _decode, dtype))) == 1  # the same bits everywhere


def _compiled(rank, ranks, folder):
    """Of 5 queries the ranks merge 3 and 2, but a graph that one rank left on disk is taken by another."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    q, k, v, d_out = _whole(5, 24, torch.bfloat16)
    keys = rt.Sharding("striped", tokens=24, ranks=ranks)

    def model(q, k, v):
        return rt.attention(q * 2.0, k, v, causal=True, group=dist.group.WORLD, replicated_q=True, sharding="striped") * 0.5

    results = []
    for call in (model, torch.compile(model, fullgraph=True)):
        local = [t.clone().requires_grad_() for t in (q, keys.shard(k, rank=rank), keys.shard(v, rank=rank))]
        o = call(*local)
        o.backward(d_out)
        results.append([o.detach(), *(t.grad for t in local)])
    return all(torch.equal(a, b) for a, b in zip(*results))


def test_compiled(tmp_path):
    for _ in range(2):
        assert all(run_ranks(2, _compiled, str(tmp_path)))


def test_simulated_on_a_device():
    q, k, v, _ = _whole(3, 40)
    for dealt in (dict(sharding="striped", replicated_q=True), dict(sharding="zigzag", sharding_k="striped")):
        outputs = []
        for device in (None, "cuda-emulated"):
            leaves = [t.clone().requires_grad_() for t in (q, k, v)]
            o = rt.attention(*leaves, causal=True, ranks=2, device=device, **dealt)
            o.square().sum().backward()
            outputs.append([o.detach(), *(t.grad for t in leaves)])
        for a, b in zip(*outputs):
            assert_close(a, b)


def _sinks(rank, ranks):
    q, k, v, d_out = _whole(3, 24)
    keys = rt.Sharding("striped", tokens=24, ranks=ranks)
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    o = rt.attention(q, keys.shard(k, rank=rank), keys.shard(v, rank=rank), group=dist.group.WORLD, replicated_q=True, sharding=keys, sinks=sinks)
    o.backward(d_out)
    total = sinks.grad.clone()
    dist.all_reduce(total)
    reference = torch.linspace(-1, 1, 4, dtype=torch.float64).requires_grad_()
    o_ref, _ = dense(q, k, v, sinks=reference)
    o_ref.backward(d_out.double())
    assert_close(o, o_ref.detach())
    assert_close(total, reference.grad)
    return True


def test_shares_of_the_gradient_of_sinks_add_up():
    assert all(run_ranks(3, _sinks))


def _mistaken(rank, ranks):
    q, k, v, _ = _whole(3, 8)
    group, odd = dist.group.WORLD, rank == 1
    lists = rt.Sharding("explicit:0-7;8-15", tokens=16, ranks=2)
    calls = [
        lambda: rt.attention(q[:, odd:], k, v, group=group, replicated_q=True, sharding="contiguous"),
        lambda: rt.attention(q, k, v, group=group, replicated_q=not odd, sharding="contiguous"),
        lambda: rt.attention(q, k, v, group=group, sharding="contiguous", sharding_k="striped" if odd else None),
        lambda: rt.attention(q, k, v, group=group, replicated_q=True, sharding=rt.Sharding("zigzag", tokens=15, ranks=2)),
        lambda: rt.attention(q, k, v, group=group, sharding=rt.Sharding("contiguous", tokens=6, ranks=2), sharding_k="explicit:0-6;7-15"),
        lambda: rt.attention(k, k[:, :4], k[:, :4], group=group, sharding=lists),
    ]
    texts = []
    for call in calls:
        with pytest.raises(ringspan.Error) as raised:
            call()
        texts.append(f"{type(raised.value).__name__}: {raised.value}".replace(f"rank {rank}/2: ", ""))
        assert rt.attention(q, k, v, group=group, replicated_q=True, sharding=lists).shape == q.shape
    return texts


def test_what_is_wrong_raises_on_all_ranks():
    first, second = (value for _, value in try_ranks(2, _mistaken))
    assert first == second == [
        "InvalidArgument: q has 2 tokens on rank 1, but 3 on rank 0; with replicated_q=True every rank has all queries",
        "CommError: ranks disagree on replicated_q: True on rank 0, False on rank 1",
        "CommError: ranks disagree on sharding of keys: contiguous on rank 0, striped on rank 1",
        "InvalidArgument: sharding is of 15 tokens over 2 ranks, but the ranks of the group hold 16 tokens of k over 2",
        "InvalidArgument: k has 8 tokens on rank 0, but sharding 'explicit:0-6;7-15' deals 7 of 16 tokens over 2 ranks to it; shard with "
        "ringspan.torch.Sharding",
        "InvalidArgument: k: sharding.lists[1] holds positions outside [0, 8): first 8, stride 1, count 8; where keys are dealt in another way "
        "than queries, say how by sharding_k=",
    ]  # fmt: skip


def test_a_forgotten_group_is_refused():
    q, k, v, _ = _whole(3, 8)
    for options, text in (
        (dict(replicated_q=True), "replicated_q .True. is for several ranks: give group="),
        (dict(sharding_k="striped"), "sharding_k .'striped'. is for several ranks: give group="),
        (dict(sharding_k=rt.Sharding("zigzag", tokens=16, ranks=2)), "sharding is of 16 tokens over 2 ranks, but k has 8 tokens on one"),
        (dict(replicated_q=1), "replicated_q .1. must be True or False"),
        (dict(ranks=2, sharding_k="spiral"), "sharding.*spiral"),
        (dict(ranks=2, sharding=rt.Sharding("zigzag", tokens=3, ranks=2), sharding_k=rt.Sharding("zigzag", tokens=9, ranks=2)), "expected 8 of k over 2"),
    ):
        with pytest.raises(ringspan.InvalidArgument, match=text):
            rt.attention(q, k, v, **options)


def test_plans():
    replicated = ringspan.plan(1, tokens_k=1 << 20, ranks=8, heads=32, kv_heads=8, head_dim=128, sharding="striped", replicated_q=True, strategy="pass-q")
    assert "queries on every rank, keys striped" in replicated._repr_html_()
    assert replicated.pairs == 32 << 17
    apart = ringspan.plan(64, tokens_k=128, ranks=4, sharding="zigzag", sharding_k="striped")
    assert "zigzag, keys striped" in apart._repr_html_()
    with pytest.raises(ringspan.InvalidArgument, match="sharding is of 64 tokens over 4 ranks; expected 128 of keys over 4"):
        ringspan.plan(64, tokens_k=128, ranks=4, sharding_k=ringspan.Sharding("zigzag", tokens=64, ranks=4))
