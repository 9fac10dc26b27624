"""flash_attn_func and its family: as flash-attn's users call them."""

import inspect

import pytest
import torch

import dense
from ringspan import InvalidArgument, Unsupported
from ringspan.fronts import flash_attn

B, H, HK, D = 2, 6, 2, 16
TAIL = dict(dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
            return_attn_probs=False)  # fmt: skip


def defaults(function):
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD]
    return [p.name for p in positional], {p.name: p.default for p in positional if p.default is not p.empty}


@pytest.mark.parametrize("name, first", [
    ("flash_attn_func", ["q", "k", "v"]),
    ("flash_attn_kvpacked_func", ["q", "kv"]),
    ("flash_attn_qkvpacked_func", ["qkv"]),
    ("flash_attn_varlen_func", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]),
    ("flash_attn_varlen_kvpacked_func", ["q", "kv", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"]),
    ("flash_attn_varlen_qkvpacked_func", ["qkv", "cu_seqlens", "max_seqlen"]),
])  # fmt: skip
def test_signatures(name, first):
    names, values = defaults(getattr(flash_attn, name))
    tail = {**TAIL, "block_table": None} if name == "flash_attn_varlen_func" else TAIL
    assert (names, values) == (first + list(tail), tail)


def bias_of(slopes, n_q, n_k):
    distance = (torch.arange(n_k)[None] - torch.arange(n_q)[:, None] - (n_k - n_q)).abs().double()
    return -slopes.double().reshape(-1, H, 1, 1) * distance


@pytest.mark.parametrize("n_q, n_k", [(13, 21), (21, 13), (1, 9)])
def test_batched(n_q, n_k):
    q, k, v = dense.tensors((B, n_q, H, D), (B, n_k, HK, D), (B, n_k, HK, D))
    slopes = torch.rand(H, generator=torch.Generator().manual_seed(3))
    slopes_b = torch.rand(B, H, generator=torch.Generator().manual_seed(4))
    cases = [
        ("full", {}, dense.band(n_q, n_k), {}),
        ("causal", dict(causal=True), dense.band(n_q, n_k, causal=True), {}),
        ("window", dict(window_size=(4, 2)), dense.band(n_q, n_k, 4, 2), {}),
        ("left window", dict(window_size=(4, -1)), dense.band(n_q, n_k, 4, -1), {}),
        ("causal window", dict(causal=True, window_size=(4, 4)), dense.band(n_q, n_k, 4, causal=True), {}),
        ("scale, softcap", dict(softmax_scale=0.2, softcap=1.5), None, dict(scale=0.2, softcap=1.5)),
        ("alibi", dict(causal=True, alibi_slopes=slopes), dense.band(n_q, n_k, causal=True), dict(bias=bias_of(slopes, n_q, n_k))),
        ("alibi per item", dict(alibi_slopes=slopes_b), None, dict(bias=bias_of(slopes_b, n_q, n_k))),
    ]
    for name, arguments, seen, scores in cases:
        out, lse, mask = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **arguments)
        assert mask is None and lse.shape == (B, H, n_q)
        dense.check(out, (q, k, v), lambda q, k, v: dense.attention(q, k, v, seen, **scores), lse=lse, name=name)
        assert torch.equal(flash_attn.flash_attn_func(q, k, v, **arguments), out), name


def test_varlen():
    offsets_q, offsets_k = [0, 4, 4, 15, 22], [0, 9, 12, 19, 22]  # an empty sequence, one with fewer queries, one with more
    q, k, v = dense.tensors((22, H, D), (22, HK, D), (22, HK, D))
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in (offsets_q, offsets_k))
    for name, arguments, bounds in [
        ("full", {}, {}),
        ("causal", dict(causal=True), dict(causal=True)),
        ("window", dict(window_size=(2, 1)), dict(left=2, right=1)),
    ]:
        out, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, cu_q, cu_k, 11, 9, return_attn_probs=True, **arguments)
        assert lse.shape == (H, 22)
        seen = dense.packed(offsets_q, offsets_k, **bounds)

        def reference(q, k, v, seen=seen):
            o, lse = dense.attention(q[None], k[None], v[None], seen)
            return o[0], lse[0]

        dense.check(out, (q, k, v), reference, lse=lse, name=name)


def test_packed_forms():
    (qkv,) = dense.tensors((B, 13, 3, H, D))
    q, k, v = qkv.unbind(2)
    expected = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), expected)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True), expected)
    dense.check(
        flash_attn.flash_attn_qkvpacked_func(qkv, causal=True), (qkv,),
        lambda x: dense.attention(*x.unbind(2), dense.band(13, 13, causal=True)), name="qkv",
    )  # fmt: skip
    cu = torch.tensor([0, 5, 13], dtype=torch.int32)
    expected = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 8, 8)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(qkv[0], cu, 8), expected)
    assert torch.equal(flash_attn.flash_attn_varlen_kvpacked_func(q[0], qkv[0, :, 1:], cu, cu, 8, 8), expected)


def test_refusals():
    q, k, v = dense.tensors((B, 9, H, D), (B, 9, HK, D), (B, 9, HK, D))
    with pytest.raises(Unsupported, match="S_dmask"):
        flash_attn.flash_attn_func(q, k, v, dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(ValueError, match="window_size"):
        flash_attn.flash_attn_func(q, k, v, window_size=4)
    with pytest.raises(ValueError, match="qkv has shape"):
        flash_attn.flash_attn_qkvpacked_func(q)
    cu = torch.tensor([0, 5, 9], dtype=torch.int32)
    arguments = [q[0], k[0], v[0], cu, cu, 5, 5]
    with pytest.raises(Unsupported, match="slopes of each sequence"):
        flash_attn.flash_attn_varlen_func(*arguments, alibi_slopes=torch.ones(2, H))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, softcap=-1.0), flash_attn.flash_attn_func(q, k, v))  # as documented
    with pytest.raises(Unsupported, match="block_table"):
        flash_attn.flash_attn_varlen_func(*arguments, block_table=torch.zeros(1))
    with pytest.raises(ValueError, match=r"max_seqlen_k \(4\) must be at least"):
        flash_attn.flash_attn_varlen_func(*arguments[:6], 4)
    with pytest.raises(ValueError, match="padding a sequence of its own"):
        flash_attn.flash_attn_varlen_func(*arguments[:3], cu[:2], cu[:2], 5, 5)
    with pytest.raises(Unsupported, match="it must have as many"):
        flash_attn.flash_attn_varlen_func(*arguments[:4], cu[:2], 5, 5)


def test_with_kvcache():
    names, values = defaults(flash_attn.flash_attn_with_kvcache)
    assert names[:5] == ["q", "k_cache", "v_cache", "k", "v"] and values == dict(
        k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None,
        softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
        return_softmax_lse=False,
    )  # fmt: skip
    q, k, v, k_new, v_new = (t.detach() for t in dense.tensors((B, 2, H, D), (B, 20, HK, D), (B, 20, HK, D), (B, 2, HK, D), (B, 2, HK, D)))
    for cached in (torch.tensor([5, 18], dtype=torch.int32), 7, None):
        for new in ((), (k_new, v_new)):
            if cached is None and new:
                continue
            for bounds in (dict(causal=True), dict(causal=True, window_size=(3, 0)), {}):
                caches = [k.clone(), v.clone()]
                out, lse = flash_attn.flash_attn_with_kvcache(q, *caches, *new, cache_seqlens=cached, return_softmax_lse=True, **bounds)
                lengths = [20, 20] if cached is None else cached.tolist() if isinstance(cached, torch.Tensor) else [cached] * B
                for b, length in enumerate(lengths):
                    rows = [torch.cat((t[b : b + 1, :length], *(n[b : b + 1] for n in added)), 1) for t, added in zip((k, v), zip(new) if new else ((), ()))]
                    n = rows[0].shape[1]
                    seen = dense.band(2, n, *bounds.get("window_size", (-1,))[:1], causal="causal" in bounds)
                    expected, expected_lse = dense.attention(q[b : b + 1], *rows, seen)
                    dense.close("o", out[b : b + 1], expected)
                    dense.close("lse", lse[b : b + 1], expected_lse)
                    assert all(torch.equal(cache[b, :n], row[0]) and torch.equal(cache[b, n:], t[b, n:]) for cache, row, t in zip(caches, rows, (k, v)))
    padded = flash_attn.flash_attn_with_kvcache(q, k.clone(), v.clone(), k_new, v_new, cache_seqlens=[9, 12], cache_leftpad=torch.tensor([4, 0]), causal=True)
    rows = [torch.cat((t[:1, 4:9], new[:1]), 1) for t, new in ((k, k_new), (v, v_new))]
    dense.close("padding on the left", padded[:1], dense.attention(q[:1], *rows, dense.band(2, 7, causal=True))[0])
    caches = [k.clone(), v.clone()]
    trained = flash_attn.flash_attn_with_kvcache(q.requires_grad_(), *caches, k_new.requires_grad_(), v_new, cache_seqlens=5)
    assert not trained.requires_grad and not caches[0].requires_grad  # as there; a cache keeps no graphs of earlier steps
    without = flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=[5, 0])
    assert not without[1].any() and without[0].any()


def test_what_kvcache_refuses():
    q, k, v, k_new = (t.detach() for t in dense.tensors((B, 2, H, D), (B, 20, HK, D), (B, 20, HK, D), (B, 2, HK, D)))
    before = k.clone()
    for name in ("block_table", "cache_batch_idx", "rotary_cos"):
        with pytest.raises(Unsupported, match=name):
            flash_attn.flash_attn_with_kvcache(q, k, v, **{name: torch.zeros(B, dtype=torch.int32)})
    for arguments, text in (
        (dict(cache_seqlens=[5, 21]), r"cache_seqlens \(\[5, 21\]\) must be 2 numbers in \[0, 20\]"),
        (dict(cache_seqlens=[5]), "must be 2 numbers"),
        (dict(cache_seqlens=[5, 6], cache_leftpad=[1, 7]), r"cache_leftpad \(\[1, 7\]\) must be 2 numbers, none above cache_seqlens"),
        (dict(k=k_new, v=k_new, cache_seqlens=[5, 19]), "need 21 of the cache, which has 20"),
        (dict(k=k_new, cache_seqlens=5), "v is missing"),
        (dict(k=k_new, v=k_new), "cache_seqlens is missing"),
        (dict(k=k_new, v=k_new[:, :1], cache_seqlens=5), r"v has shape \(2, 1, 2, 16\); expected \(2, 2, 2, 16\)"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            flash_attn.flash_attn_with_kvcache(q, k, v, **arguments)
    with pytest.raises(InvalidArgument, match="v.dtype .torch.float16. must equal v_cache.dtype"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k_new, k_new.half(), cache_seqlens=5)
    with pytest.raises(InvalidArgument, match="dtype"):
        flash_attn.flash_attn_with_kvcache(q.half(), k, v, k_new, k_new, cache_seqlens=5)
    with pytest.raises(InvalidArgument, match="alibi_slopes"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k_new, k_new, cache_seqlens=5, alibi_slopes=torch.zeros(H + 1))
    with pytest.raises(InvalidArgument, match=r"cache_seqlens\[0\] \(3.7\) must be an integer"):
        flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=[3.7, 4])
    with pytest.raises(InvalidArgument, match="window_size"):
        flash_attn.flash_attn_with_kvcache(q, k, v, k_new, k_new, cache_seqlens=5, window_size=(-1,))
    with pytest.raises(InvalidArgument, match="v_cache has shape"):
        flash_attn.flash_attn_with_kvcache(q, k, v[:, :7], k_new, k_new, cache_seqlens=5)
    assert torch.equal(k, before)
