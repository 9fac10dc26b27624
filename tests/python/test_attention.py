"""ringspan.torch.attention against float64, forward and backward, on one rank and on simulated ones."""

import pytest
import torch
from reference import assert_close, attention, dilated_counts, mask_of

import ringspan
import ringspan.torch as rt


def _inputs(n_q, n_k=None, heads=4, kv_heads=None, dim=16, dim_v=None, batch=2, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    n_k, kv_heads, dim_v = n_k or n_q, kv_heads or heads, dim_v or dim
    shapes = (batch, n_q, heads, dim), (batch, n_k, kv_heads, dim), (batch, n_k, kv_heads, dim_v)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def _compare(tensors, expected, options, dtype=torch.float32, with_lse=True, extra=()):
    """expected(q, k, v) -> (o, lse) in float64; both results and all gradients are compared."""
    o, lse = rt.attention(*tensors, return_lse=True, **options)
    d_out, d_lse = torch.randn_like(o), torch.randn_like(lse)
    reference = [t.detach().double().requires_grad_() for t in (*tensors, *extra)]
    o_ref, lse_ref = expected(*reference)
    assert_close(o, o_ref, dtype, "o")
    assert_close(lse, lse_ref, dtype, "lse")
    finite = torch.isfinite(lse_ref)
    loss = (o * d_out).sum()
    loss_ref = (o_ref * d_out.double()).sum()
    if with_lse:
        loss = loss + (lse * d_lse).masked_fill(~finite, 0).sum() if finite.all() else loss
        loss_ref = loss_ref + (lse_ref * d_lse.double()).sum() if finite.all() else loss_ref
    loss.backward()
    loss_ref.backward()
    for name, t, ref in zip(("dq", "dk", "dv", "dsinks"), (*tensors, *extra), reference):
        assert_close(t.grad, ref.grad, dtype, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [None, 1, 2, 3])
@pytest.mark.parametrize("n_q, n_k", [(1, 1), (67, 67), (31, 80), (80, 31)])
def test_causal(dtype, ranks, n_q, n_k):
    mask = mask_of(n_q, n_k, causal=True)
    _compare(_inputs(n_q, n_k, dtype=dtype), lambda q, k, v: attention(q, k, v, mask), dict(causal=True, ranks=ranks), dtype)


@pytest.mark.parametrize("strategy", ["ring", "exchange", "all-gather", "ulysses", "pass-q", "local"])
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped", "block_striped:4"])
def test_strategies_and_shardings(strategy, sharding):
    mask = mask_of(53, 53, causal=True, window=(20, 0))
    options = dict(causal=True, window=(20, 0), ranks=3, strategy=strategy, sharding=sharding)
    _compare(_inputs(53), lambda q, k, v: attention(q, k, v, mask), options)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("ranks", [None, 4])
def test_grouped_heads_and_another_head_dim_of_v(kv_heads, ranks):
    _compare(_inputs(40, heads=4, kv_heads=kv_heads, dim_v=24), attention, dict(ranks=ranks))


def test_top_left():
    mask = mask_of(20, 50, causal=True, top_left=True)
    _compare(_inputs(20, 50), lambda q, k, v: attention(q, k, v, mask), dict(pattern="causal@top_left"))


@pytest.mark.parametrize("ranks", [None, 3])
def test_documents(ranks):
    offsets = [0, 5, 5, 40, 61]
    mask = mask_of(61, 61, causal=True, cu_q=offsets)
    options = dict(causal=True, cu_seqlens=torch.tensor(offsets, dtype=torch.int32), ranks=ranks)
    _compare(_inputs(61, batch=1), lambda q, k, v: attention(q, k, v, mask), options)


def test_packed_documents_without_a_batch():
    offsets = [0, 7, 30]
    q, k, v = (t.detach()[0].requires_grad_() for t in _inputs(30, batch=1))
    o, lse = rt.attention(q, k, v, causal=True, cu_seqlens=offsets, layout="thd", return_lse=True)
    assert o.shape == q.shape and lse.shape == (4, 30)
    expected, expected_lse = attention(q[None], k[None], v[None], mask_of(30, 30, causal=True, cu_q=offsets))
    assert_close(o, expected[0])
    assert_close(lse, expected_lse[0])
    o.sum().backward()
    assert q.grad.shape == q.shape


def test_lengths_are_padding():
    q, k, v = _inputs(20, batch=3)
    lengths = [20, 7, 0]
    o, lse = rt.attention(q, k, v, causal=True, lengths=lengths, return_lse=True)
    o.sum().backward()
    for b, n in enumerate(lengths):
        if n > 0:
            expected, _ = attention(q[b : b + 1, :n], k[b : b + 1, :n], v[b : b + 1, :n], mask_of(n, n, causal=True))
            assert_close(o[b : b + 1, :n], expected)
        assert (o[b, n:] == 0).all() and torch.isneginf(lse[b, :, n:]).all()
        assert (q.grad[b, n:] == 0).all() and (v.grad[b, n:] == 0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("ranks", [None, 2, 3])
def test_dilated(causal, ranks):
    branches = [(8, 1), (16, 2), (64, 4)]
    counts = dilated_counts(70, 4, branches, causal)
    options = dict(pattern="dilated:8x1,16x2,64x4", causal=causal, ranks=ranks, sharding="contiguous")
    _compare(_inputs(70), lambda q, k, v: attention(q, k, v, counts=counts), options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [None, 3])
def test_torchscale_keeps_o_of_each_branch(dtype, ranks):
    """Its gradient takes the weights of the merge as constants: not that of the forward, but that of sum_b w_b o_b."""
    q, k, v = _inputs(48, dtype=dtype)
    branches = [(16, 1), (48, 2)]
    o = rt.attention(q, k, v, pattern="dilated:16x1,48x2@torchscale", causal=True, ranks=ranks, sharding="contiguous")
    d_out = torch.randn_like(o)
    o.backward(d_out)
    ref = [t.detach().double().requires_grad_() for t in (q, k, v)]
    outputs, sums = [], []
    h = torch.arange(4)
    for w, r in branches:
        i, j = torch.arange(48)[:, None], torch.arange(48)[None, :]
        residue = (h // -(-4 // r))[:, None, None]
        mask = (i // w == j // w) & (i % w % r == residue) & (j % w % r == residue) & (j <= i)
        o_b, lse_b = attention(*ref, mask)
        outputs.append(o_b)
        sums.append(lse_b)
    weights = torch.softmax(torch.stack(sums), 0).nan_to_num(0.0).detach()
    expected = sum(w.transpose(1, 2)[..., None] * o_b for w, o_b in zip(weights, outputs))
    assert_close(o, expected, dtype)
    expected.backward(d_out.double())
    for name, t, e in zip(("dq", "dk", "dv"), (q, k, v), ref):
        assert_close(t.grad, e.grad, dtype, name)


def test_several_forwards_before_their_backwards():
    """As the layers of a model: what backward needs leaves the arena, which they share."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [_inputs(33, dtype=dtype, seed=s) for s in range(3)]
        outputs = [rt.attention(*t, causal=True) for t in tensors]
        for t, o in zip(reversed(tensors), reversed(outputs)):
            o.backward(torch.ones_like(o))
            reference = [x.detach().double().requires_grad_() for x in t]
            attention(*reference, mask_of(33, 33, causal=True))[0].sum().backward()
            for x, e in zip(t, reference):
                assert_close(x.grad, e.grad, dtype)


@pytest.mark.parametrize("ranks", [None, 3])
def test_scale_softcap_alibi_sinks(ranks):
    q, k, v = _inputs(45)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    sinks = torch.randn(4).requires_grad_()
    mask = mask_of(45, 45, causal=True)
    options = dict(causal=True, scale=0.3, softcap=5.0, alibi_slopes=slopes, sinks=sinks, ranks=ranks)

    def expected(q, k, v, sinks):
        return attention(q, k, v, mask, scale=0.3, softcap=5.0, alibi=slopes, sinks=sinks)

    _compare((q, k, v), expected, options, extra=(sinks,))


@pytest.mark.parametrize("ranks", [None, 2])
def test_dropout(ranks):
    """The rate is right on average, the same seed gives the same result for any number of ranks, gradients are those of the
    forward: checked along a direction."""
    q, k, v = _inputs(64)
    options = dict(dropout_p=0.25, dropout_seed=5, ranks=ranks)
    o = rt.attention(q, k, v, **options)
    assert_close(o, rt.attention(q, k, v, dropout_p=0.25, dropout_seed=5).double())
    assert not torch.equal(o, rt.attention(q, k, v, dropout_p=0.25, dropout_seed=6, ranks=ranks))
    ones = torch.ones_like(v)
    assert abs(rt.attention(q, k, ones, **options).mean().item() - 1.0) < 0.05
    d_out = torch.randn_like(o)
    o.backward(d_out)
    with torch.no_grad():
        for t in (q, k, v):
            direction = torch.randn_like(t)
            values = []
            for step in (1e-2, -1e-2):
                moved = [x + step * direction if x is t else x for x in (q, k, v)]
                values.append((rt.attention(*moved, **options).double() * d_out).sum().item())
            difference = (values[0] - values[1]) / 2e-2
            gradient = (t.grad * direction).sum().item()
            assert abs(difference - gradient) < 2e-2 * max(1.0, abs(gradient))
    torch.manual_seed(3)
    first = rt.attention(q, k, v, dropout_p=0.25)
    torch.manual_seed(3)
    assert torch.equal(first, rt.attention(q, k, v, dropout_p=0.25))
    assert not torch.equal(first, rt.attention(q, k, v, dropout_p=0.25))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layouts_and_strided_views_are_read_in_place(monkeypatch, layout):
    """Projections that come out of one matrix, every second token, swapped axes: no copies, right gradients."""
    torch.manual_seed(0)
    packed = torch.randn(2, 50, 3, 4, 16, requires_grad=True)
    views = [packed[:, ::2, i] for i in range(3)]
    if layout == "bhsd":
        views = [t.transpose(1, 2) for t in views]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "contiguous", None)
        patch.setattr(torch.Tensor, "clone", None)
        o = rt.attention(*views, causal=True, layout=layout)
    assert o.shape == views[0].shape and o.is_contiguous()
    o.sum().backward()
    reference = packed.detach().double().requires_grad_()
    attention(*(reference[:, ::2, i] for i in range(3)), mask_of(25, 25, causal=True))[0].sum().backward()
    assert_close(packed.grad, reference.grad)


def test_a_strided_last_dimension_is_copied_rightly():
    q = torch.randn(1, 20, 2, 32)[..., ::2]
    assert_close(rt.attention(q, q, q), attention(q, q, q)[0])


def test_an_expanded_gradient():
    q, k, v = _inputs(20)
    rt.attention(q, k, v).mean().backward()  # a gradient with strides 0
    reference = [t.detach().double().requires_grad_() for t in (q, k, v)]
    attention(*reference)[0].mean().backward()
    for t, e in zip((q, k, v), reference):
        assert_close(t.grad, e.grad)


def test_only_lse_is_used():
    q, k, v = _inputs(20)
    rt.attention(q, k, v, return_lse=True)[1].sum().backward()
    reference = [t.detach().double().requires_grad_() for t in (q, k, v)]
    attention(*reference)[1].sum().backward()
    assert_close(q.grad, reference[0].grad)
    assert (v.grad == 0).all()


def test_empty():
    q = torch.zeros(2, 0, 4, 16, requires_grad=True)
    o = rt.attention(q, q, q, causal=True)
    o.sum().backward()
    assert o.shape == q.shape == q.grad.shape
    more = torch.randn(1, 5, 4, 16)
    nothing = torch.zeros(1, 0, 4, 16)
    o, lse = rt.attention(more, nothing, nothing, return_lse=True)
    assert (o == 0).all() and torch.isneginf(lse).all()


@pytest.mark.parametrize("options", [{}, dict(ranks=2), dict(layout="bhsd"), dict(device="cuda-emulated", host_tensors=True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_of_nothing(dtype, options):
    whole, sinks = torch.randn(3, 4, 4, 16, dtype=dtype, requires_grad=True), torch.zeros(4, requires_grad=True)
    q = whole[:0]
    o, lse = rt.attention(q, q, q[..., :8], causal=True, sinks=sinks, return_lse=True, **options)
    (o.sum() + lse.sum()).backward()
    assert o.shape == (0, 4, 4, 8) and o.dtype == dtype
    assert lse.shape == (0, 4, 4) and lse.dtype == torch.float32
    assert (whole.grad == 0).all() and (sinks.grad == 0).all()
    with pytest.raises(ringspan.InvalidArgument, match="casual"):
        rt.attention(q, q, q, pattern="casual")


def test_more_ranks_than_tokens():
    _compare(_inputs(3), lambda q, k, v: attention(q, k, v, mask_of(3, 3, causal=True)), dict(causal=True, ranks=7))


def test_same_bits_again():
    q, k, v = _inputs(100)
    first = rt.attention(q, k, v, causal=True, ranks=3, strategy="ring")
    for _ in range(3):
        assert torch.equal(first, rt.attention(q, k, v, causal=True, ranks=3, strategy="ring"))


def test_a_memory_budget():
    q, k, v = _inputs(200, batch=1)
    with pytest.raises(ringspan.OutOfBudget, match="smallest"):
        rt.attention(q, k, v, ranks=2, strategy="ring", memory_budget=1000)


def test_other_threads_run_while_kernels_compute():
    """The interpreter is free meanwhile."""
    import threading

    q = torch.randn(1, 3000, 4, 64)
    done = threading.Event()
    turns = 0

    def count():
        nonlocal turns
        while not done.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    rt.attention(q, q, q, causal=True)
    thread.start()
    try:
        before = turns
        rt.attention(q, q, q, causal=True)
        during = turns - before
    finally:
        done.set()
        thread.join()
    assert during >= 3


def test_calls_from_several_threads():
    from concurrent.futures import ThreadPoolExecutor

    tensors = [_inputs(60, seed=s) for s in range(8)]
    expected = [rt.attention(*t, causal=True).detach() for t in tensors]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda t: rt.attention(*t, causal=True).detach(), tensors))
    for a, b in zip(results, expected):
        assert torch.equal(a, b)
