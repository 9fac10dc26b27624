"""ring-flash-attention's functions, over processes, as its own tests call them."""

import copy
import inspect
import types

import pytest
import torch
import torch.distributed as dist

import dense
import worlds
from ringspan import CommError, Error, InvalidArgument
from ringspan.fronts import ring_flash_attn as rfa

H, HK, D = 6, 2, 8
TAIL = ["dropout_p", "softmax_scale", "causal", "window_size", "alibi_slopes", "deterministic", "return_attn_probs", "group"]


@pytest.mark.parametrize("name", ["ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn", "llama3_flash_attn"])
def test_signatures(name):
    llama3 = ["cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "heads_k_stride", "local_k_slice"]
    for kind, offsets in (("", []), ("_varlen", llama3 if "llama3" in name else ["cu_seqlens", "max_seqlen"])):
        if "llama3" in name and not kind:
            continue
        for packed, first in (("", ["q", "k", "v"]), ("_kvpacked", ["q", "kv"]), ("_qkvpacked", ["qkv"])):
            function = getattr(rfa, f"{name}{kind}{packed}_func")
            assert function.__name__ == f"{name}{kind}{packed}_func"
            parameters = inspect.signature(function).parameters
            assert list(parameters) == first + offsets + TAIL
            assert [p.default for p in parameters.values()][-len(TAIL) :] == [0.0, None, False, (-1, -1), None, False, False, None]


def test_prepare_cu_seqlens():
    """Values worked out by hand: 4 chunks of 6 tokens of the sequences [0, 4), [4, 15), [15, 24)."""
    cu = torch.tensor([0, 4, 15, 24], dtype=torch.int32)
    expected = {  # rank: cu_q, cu_k causal, slice causal, cu_k full, slice full
        0: ([0, 4, 6], [0, 4, 6], slice(0, 6), [0, 4, 15], slice(0, 15)),
        1: ([0, 6], [0, 8], slice(4, 12), [0, 11], slice(4, 15)),
        2: ([0, 3, 6], [0, 11, 14], slice(4, 18), [0, 11, 20], slice(4, 24)),
        3: ([0, 6], [0, 9], slice(15, 24), [0, 9], slice(15, 24)),
    }
    for rank, (cu_q, cu_k, keys, full_k, full) in expected.items():
        for causal, want_k, want in ((True, cu_k, keys), (False, full_k, full)):
            q, k, max_q, max_k, local = rfa.llama3_flash_attn_prepare_cu_seqlens(cu, causal, rank, 4)
            assert (q.tolist(), k.tolist(), local) == (cu_q, want_k, want)
            assert q.dtype == cu.dtype
            assert (max_q, max_k) == (max(b - a for a, b in zip(cu_q, cu_q[1:])), max(b - a for a, b in zip(want_k, want_k[1:])))
    with pytest.raises(ValueError, match="must divide"):
        rfa.llama3_flash_attn_prepare_cu_seqlens(cu, True, 0, 5)


def chunks_of(kind, n, rank, p):
    """Positions of a rank, as ring-flash-attention's tests cut tensors."""
    position = torch.arange(n)
    if kind == "stripe":
        return position[rank::p]
    if kind == "zigzag":
        parts = position.chunk(2 * p)
        return torch.cat((parts[rank], parts[2 * p - 1 - rank]))
    return position.chunk(p)[rank]


def local(q, k, v, mine, dim):
    return [t.detach().index_select(dim, mine).requires_grad_() for t in (q, k, v)]


def check_local(name, out, lse, inputs, whole, seen, mine, **scores):
    """Output, lse and gradients of this rank, when every rank weighs its output with its part of one random tensor."""
    q, k, v = (t.detach().double().requires_grad_() for t in whole)
    batched = q.dim() == 4
    o, expected_lse = dense.attention(*((q, k, v) if batched else (q[None], k[None], v[None])), seen, **scores)
    dim = 1 if batched else 0
    o, expected_lse = (o, expected_lse) if batched else (o[0], expected_lse[0])
    dense.close(f"{name} o", out, o.index_select(dim, mine))
    dense.close(f"{name} lse", lse, expected_lse.index_select(-1, mine))
    (weight,) = dense.tensors(o.shape, seed=9)
    weight = weight.detach()
    expected = torch.autograd.grad((o * weight.double()).sum(), (q, k, v))
    grads = torch.autograd.grad((out * weight.index_select(dim, mine)).sum(), inputs)
    for which, grad, want in zip("qkv", grads, expected):
        dense.close(f"{name} d{which}", grad, want.index_select(dim, mine))


def batched_functions(rank, p):
    n = 12 * p
    whole = dense.tensors((2, n, H, D), (2, n, HK, D), (2, n, HK, D))
    slopes = torch.rand(H, generator=torch.Generator().manual_seed(3))
    distance = (torch.arange(n)[None] - torch.arange(n)[:, None]).abs().double()
    bias = -slopes.double().reshape(1, H, 1, 1) * distance
    for kind, prefix in (("ring", "ring_flash_attn"), ("zigzag", "zigzag_ring_flash_attn"), ("stripe", "stripe_flash_attn")):
        mine = chunks_of(kind, n, rank, p)
        for case, arguments, seen, scores in (
            ("full", dict(), None, dict()),
            ("causal, scale", dict(causal=True, softmax_scale=0.2), dense.band(n, n, causal=True), dict(scale=0.2)),
            ("window", dict(causal=True, window_size=(7, 0)), dense.band(n, n, 7, causal=True), dict()),
            ("alibi", dict(causal=True, alibi_slopes=slopes), dense.band(n, n, causal=True), dict(bias=bias)),
        ):
            name = f"rank {rank}/{p}: {kind} {case}"
            q, k, v = local(*whole, mine, 1)
            out, lse, probabilities = getattr(rfa, f"{prefix}_func")(q, k, v, return_attn_probs=True, **arguments)
            assert probabilities is None
            check_local(name, out, lse, (q, k, v), whole, seen, mine, **scores)
            kv = torch.stack((k, v), dim=2)
            assert torch.equal(getattr(rfa, f"{prefix}_kvpacked_func")(q, kv, **arguments), out), name
    for prefix in ("ring_flash_attn", "zigzag_ring_flash_attn", "stripe_flash_attn"):
        (qkv,) = dense.tensors((2, 12, 3, H, D), seed=rank)
        expected = getattr(rfa, f"{prefix}_func")(*qkv.unbind(2), causal=True)
        assert torch.equal(getattr(rfa, f"{prefix}_qkvpacked_func")(qkv, causal=True), expected), prefix


def varlen_functions(rank, p):
    offsets = [0, 2 * p, 10 * p, 16 * p]
    n = offsets[-1]
    whole = dense.tensors((n, H, D), (n, HK, D), (n, HK, D))
    local_cu = torch.tensor(offsets, dtype=torch.int32) // p
    for kind, prefix in (("ring", "ring_flash_attn"), ("zigzag", "zigzag_ring_flash_attn"), ("stripe", "stripe_flash_attn")):
        mine = torch.cat([a + chunks_of(kind, b - a, rank, p) for a, b in zip(offsets, offsets[1:])])
        for case, arguments, bounds in (("full", {}, {}), ("causal", dict(causal=True), dict(causal=True))):
            name = f"rank {rank}/{p}: {kind} varlen {case}"
            q, k, v = local(*whole, mine, 0)
            function = getattr(rfa, f"{prefix}_varlen_func")
            out, lse, _ = function(q, k, v, local_cu, 8, return_attn_probs=True, **arguments)
            check_local(name, out, lse, (q, k, v), whole, dense.packed(offsets, offsets, **bounds), mine)
            kv = torch.stack((k, v), dim=1)
            assert torch.equal(getattr(rfa, f"{prefix}_varlen_kvpacked_func")(q, kv, local_cu, 8, **arguments), out), name
            (qkv,) = dense.tensors((n // p, 3, H, D), seed=rank)
            packed = getattr(rfa, f"{prefix}_varlen_qkvpacked_func")(qkv, local_cu, 8, **arguments)
            assert torch.equal(packed, function(*qkv.unbind(1), local_cu, 8, **arguments)), name
    try:
        rfa.zigzag_ring_flash_attn_varlen_func(q, k, v, torch.tensor([0, 3, 16]), 13)
    except InvalidArgument as error:
        assert "must be even" in str(error)
    else:
        raise AssertionError("odd sequences must be refused")


def llama3_functions(rank, p):
    offsets = torch.tensor([0, 5, 6 * p, 6 * p + 7, 12 * p], dtype=torch.int32)  # one begins where a rank does
    n = int(offsets[-1])
    whole = dense.tensors((n, H, D), (n, HK, D), (n, HK, D))
    mine = torch.arange(n).chunk(p)[rank]
    for causal in (False, True):
        prepared = rfa.llama3_flash_attn_prepare_cu_seqlens(offsets, causal, rank, p)
        q, k, v = local(*whole, mine, 0)
        rest = (*prepared[:4], 1, prepared[4])
        out, lse, _ = rfa.llama3_flash_attn_varlen_func(q, k, v, *rest, causal=causal, return_attn_probs=True)
        seen = dense.packed(offsets.tolist(), offsets.tolist(), causal=causal)
        check_local(f"rank {rank}/{p}: llama3 causal={causal}", out, lse, (q, k, v), whole, seen, mine)
        lists = (prepared[0].tolist(), prepared[1].tolist(), *rest[2:])
        assert torch.equal(rfa.llama3_flash_attn_varlen_func(q, k, v, *lists, causal=causal), out)
        assert rfa.llama3_flash_attn_prepare_cu_seqlens(offsets.tolist(), causal, rank, p)[0].tolist() == lists[0]
        kv = torch.stack((k, v), dim=1)
        assert torch.equal(rfa.llama3_flash_attn_varlen_kvpacked_func(q, kv, *rest, causal=causal), out)
        (qkv,) = dense.tensors((n // p, 3, H, D), seed=rank)
        packed = rfa.llama3_flash_attn_varlen_qkvpacked_func(qkv, *rest, causal=causal)
        assert torch.equal(packed, rfa.llama3_flash_attn_varlen_func(*qkv.unbind(1), *rest, causal=causal))
    # One sequence: prepared for causal, the last rank cannot tell, and is told by the others.
    prepared = rfa.llama3_flash_attn_prepare_cu_seqlens(offsets[[0, -1]], True, rank, p)
    for causal, stride, match in ((False, 1, "are not those of"), (True, 1 + 2 * (rank == 0), "heads_k_stride")):
        try:
            rfa.llama3_flash_attn_varlen_func(q, k, v, *prepared[:4], stride, prepared[4], causal=causal)
        except (InvalidArgument, CommError) as error:
            assert match in str(error), error
        else:
            raise AssertionError(f"{match}: must be refused on rank {rank}")


def a_group_of_some(rank, p):
    """The group argument: ranks 0 and p - 1 only."""
    group = dist.new_group([0, p - 1])
    if rank in (0, p - 1):
        n = 8
        whole = dense.tensors((1, n, H, D), (1, n, HK, D), (1, n, HK, D))
        mine = chunks_of("zigzag", n, dist.get_rank(group), 2)
        q, k, v = local(*whole, mine, 1)
        out, lse, _ = rfa.zigzag_ring_flash_attn_func(q, k, v, causal=True, return_attn_probs=True, group=group)
        check_local(f"rank {rank} of a sub-group", out, lse, (q, k, v), whole, dense.band(n, n, causal=True), mine)


def unequal_shards(rank, p):
    q, k, v = dense.tensors(*[(1, 4 + 2 * (rank == 1), H, D)] * 3)
    try:
        rfa.zigzag_ring_flash_attn_func(q, k, v, causal=True)
    except (InvalidArgument, CommError) as error:
        assert "tokens" in str(error), error
    else:
        raise AssertionError(f"rank {rank}: shards of unequal length must be refused")


def wrong_on_one(rank, p):
    """An argument that is wrong on the last rank only is raised on all, and the group goes on."""
    from ringspan.fronts import flash_attn, torchscale, yunchang

    odd = rank == p - 1
    x = torch.ones(1, 4, 2, 8)
    qkv, packed = torch.ones(1, 4, 3, 2, 8), torch.ones(4, 3, 2, 8)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    window = (1, 2, 3) if odd else (-1, -1)
    yunchang.set_seq_parallel_pg(1, p, rank, p)
    args = types.SimpleNamespace(segment_length=[4], dilated_ratio=[1], layernorm_eps=1e-5, seq_parallel=True)
    dilated = copy.deepcopy(torchscale.DilatedAttention(args, 16, 2, self_attention=True, group=dist.group.WORLD))
    y = torch.ones(1, 4, 16)
    cut = (lambda t: t[..., 0]) if odd else (lambda t: t)
    prepared = rfa.llama3_flash_attn_prepare_cu_seqlens(torch.tensor([0, 4 * p]), False, rank, p)
    calls = [
        lambda: rfa.ring_flash_attn_func(x, x, x, window_size=window),
        lambda: rfa.zigzag_ring_flash_attn_qkvpacked_func(cut(qkv)),
        lambda: rfa.ring_flash_attn_kvpacked_func(x, cut(qkv[:, :, 1:])),
        lambda: rfa.ring_flash_attn_func(x, x, x, dropout_p=0.5 if odd else 0.0, return_attn_probs=True),
        lambda: rfa.ring_flash_attn_varlen_func(x[0], x[0], x[0], offsets, 4, window_size=window),
        lambda: rfa.ring_flash_attn_varlen_qkvpacked_func(cut(packed), offsets, 4),
        lambda: rfa.llama3_flash_attn_varlen_func(
            x[0], x[0], x[0], *prepared[:4], None if odd else 1, prepared[4]),
        lambda: rfa.llama3_flash_attn_varlen_func(x[0], x[0], x[0], *prepared[:4], 1, prepared[4], window_size=window),
        lambda: rfa.llama3_flash_attn_varlen_func(x[0], x[0], x[0], *prepared[:4], 1, None if odd else prepared[4]),
        lambda: rfa.llama3_flash_attn_varlen_func(
            x[0], x[0], x[0], *prepared[:4], 1, prepared[4], dropout_p=0.5 if odd else 0.0, return_attn_probs=True),
        lambda: rfa.llama3_flash_attn_varlen_kvpacked_func(x[0], cut(packed[:, 1:]), *prepared[:4], 1, prepared[4]),
        lambda: rfa.llama3_flash_attn_varlen_qkvpacked_func(cut(packed), *prepared[:4], 1, prepared[4]),
        lambda: flash_attn.flash_attn_func(x, x, x, window_size=window, group=dist.group.WORLD),
        lambda: flash_attn.flash_attn_qkvpacked_func(cut(qkv), group=dist.group.WORLD),
        lambda: yunchang.UlyssesAttention(dist.group.WORLD)(x, x, x, window_size=window),
        lambda: yunchang.LongContextAttentionQKVPacked()(cut(qkv)),
        lambda: yunchang.LongContextAttention()(x, *([x[:, :2]] * 2 if odd else [x, x])),
        lambda: dilated(y, y, y, attn_mask=y if odd else None),
    ]  # fmt: skip
    for index, call in enumerate(calls):
        with pytest.raises(Error) as raised:
            call()
        assert "no sign of life" not in str(raised.value) and "died" not in str(raised.value), (index, raised.value)
        rfa.ring_flash_attn_func(x, x, x)


def everything(rank, p):
    batched_functions(rank, p)
    varlen_functions(rank, p)
    llama3_functions(rank, p)
    a_group_of_some(rank, p)
    unequal_shards(rank, p)
    wrong_on_one(rank, p)


@pytest.mark.parametrize("p", [2, 3])
def test_over_ranks(p):
    worlds.run_ranks(p, everything)


def test_needs_a_process_group():
    with pytest.raises(ValueError, match="not initialized"):
        rfa.ring_flash_attn_func(*dense.tensors(*[(1, 4, H, D)] * 3))
