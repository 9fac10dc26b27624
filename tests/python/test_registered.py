"""torch.library: fake kernels and autograd are right, and what rests on them works: torch.compile, checkpointing, autocast."""

import pytest
import torch
from reference import assert_close, attention, mask_of
from torch.utils.checkpoint import checkpoint

import ringspan
import ringspan.torch as rt
from ringspan.torch import _attention, _ops


def _inputs(n=40, dtype=torch.float32, batch=2, heads=4, dim=16, grad=True):
    torch.manual_seed(0)
    return [torch.randn(batch, n, heads, dim).to(dtype).requires_grad_(grad) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_opcheck(monkeypatch, dtype, layout):
    q, k, v = _inputs(12, dtype)
    if layout == "bhsd":
        q, k, v = (t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))
    with monkeypatch.context() as patch:
        calls = []
        patch.setattr(_ops, "are_ordinary", lambda *tensors: False)
        patch.setattr(_attention, "_RECENT", None)
        patch.setattr(_ops, "attend", lambda *inputs: calls.append(inputs) or (q, q))
        rt.attention(q, k, v, causal=True, sinks=torch.zeros(4, requires_grad=True), layout=layout)
    ((*inputs, text, _, heads_first),) = calls
    if heads_first:
        inputs[:3] = [t.transpose(1, 2) for t in inputs[:3]]
    inputs = [t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.requires_grad else t for t in inputs]
    torch.library.opcheck(torch.ops.ringspan.attention_forward.default, (*inputs, text, ""))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dynamic):
    torch._dynamo.reset()

    def model(q, k, v, sinks):
        o, lse = rt.attention(q * 2.0, k, v, causal=True, window=(10, 0), sinks=sinks, layout="bhsd", return_lse=True)
        return (o.transpose(1, 2) + 1.0) * 0.5, lse

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n in (24, 40):
        sinks = torch.randn(4).requires_grad_()
        q, k, v = (t.detach().transpose(1, 2).contiguous().requires_grad_() for t in _inputs(n))
        o, lse = compiled(q, k, v, sinks)
        (o.sum() + lse.sum()).backward()
        grads = [t.grad.clone() for t in (q, k, v, sinks)]
        for t in (q, k, v, sinks):
            t.grad = None
        expected, expected_lse = model(q, k, v, sinks)
        (expected.sum() + expected_lse.sum()).backward()
        assert_close(o, expected)
        assert_close(lse, expected_lse)
        for a, t in zip(grads, (q, k, v, sinks)):
            assert_close(a, t.grad)


def test_compile_with_numbers_that_change():
    torch._dynamo.reset()
    x = _inputs(16, grad=False)[0]
    function = torch.compile(lambda x, scale, cap: rt.attention(x, x, x, scale=scale, softcap=cap), fullgraph=True, backend="aot_eager")
    for scale, cap in ((0.1, 1.0), (0.2, 2.0), (0.3, 3.0)):
        assert torch.equal(function(x, scale, cap), rt.attention(x, x, x, scale=scale, softcap=cap))


@pytest.mark.parametrize("name", ["window", "bucket_rows", "memory_budget", "ranks", "dropout_seed", "lengths", "a length"])
def test_compile_with_integers_that_change(name):
    torch._dynamo.reset()
    x = _inputs(16, grad=False)[0]

    def call(x, n):
        options = {
            "window": dict(window=(n, 0)), "memory_budget": dict(memory_budget=n << 24), "dropout_seed": dict(dropout_p=0.5, dropout_seed=n),
            "lengths": dict(lengths=[n, n]), "a length": dict(window=(x.shape[1] // 2, 0)),
        }  # fmt: skip
        return rt.attention(x, x, x, **options.get(name, {name: n}))

    function = torch.compile(call, fullgraph=True, backend="aot_eager")
    for n in (3, 4, 5, 7):
        y = torch.cat([x] * n, 1) if name == "a length" else x
        assert torch.equal(function(y, n), call(y, n)), n


def test_positions_in_a_graph():
    """Of several shardings, which change; what is returned is the caller's to change."""
    torch._dynamo.reset()

    def call(x, sharding, rank):
        first = sharding.positions(rank)
        first += 1
        return x[:, first - 1] + x[:, sharding.positions(rank)] + x[:, striped.positions(1)].sum()

    striped = rt.Sharding("striped", tokens=12, ranks=3)
    function = torch.compile(call, fullgraph=True, backend="aot_eager")
    for tokens, rank in ((20, 0), (20, 1), (31, 1), (42, 2)):
        x = torch.randn(1, tokens, 3, requires_grad=True)
        sharding = rt.Sharding("zigzag", tokens=tokens, ranks=3)
        expected = 2 * x[:, ringspan.Sharding("zigzag", tokens=tokens, ranks=3).positions(rank).tolist()] + x[:, [1, 4, 7, 10]].sum()
        assert torch.equal(function(x, sharding, rank), expected) and torch.equal(call(x, sharding, rank), expected)
    torch.library.opcheck(torch.ops.ringspan.positions.default, ("zigzag", 20, 3, 1))


def test_compile_with_inductor():
    torch._dynamo.reset()

    def model(x, w):
        q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).unbind(2)
        return rt.attention(q, k, v, causal=True, ranks=2, dropout_p=0.0).flatten(2).sum(-1)

    x, w = torch.randn(2, 33, 64, requires_grad=True), torch.randn(64, 192, requires_grad=True)
    expected = model(x, w)
    expected.sum().backward()
    grad, w.grad = w.grad, None
    got = torch.compile(model, fullgraph=True)(x, w)
    got.sum().backward()
    assert_close(got, expected)
    assert_close(w.grad, grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_vmap_trains(compiled):
    torch._dynamo.reset()
    torch.manual_seed(0)
    q, k = torch.randn(3, 2, 20, 4, 16, requires_grad=True), torch.randn(2, 20, 4, 16)

    def mapped(q, k):
        return torch.vmap(lambda q: rt.attention(q, k, k, causal=True))(q)

    o = (torch.compile(mapped, fullgraph=True, backend="aot_eager") if compiled else mapped)(q, k)
    o.square().sum().backward()
    grad, q.grad = q.grad, None
    expected = torch.stack([rt.attention(x, k, k, causal=True) for x in q])
    expected.square().sum().backward()
    assert torch.equal(o, expected) and torch.equal(grad, q.grad)


class _Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        return rt.attention(q, k, v, causal=True).flatten(2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
def test_an_exported_module_trains(dtype, grad):
    torch.manual_seed(0)
    layer, x = _Layer().to(dtype), torch.randn(2, 30, 32, dtype=dtype)
    with torch.set_grad_enabled(grad):
        exported = torch.export.export(layer, (x,)).module()
    exported(x).float().square().sum().backward()
    layer(x).float().square().sum().backward()
    assert torch.equal(exported.qkv.weight.grad, layer.qkv.weight.grad)
    with torch.no_grad():
        assert torch.equal(exported(x), layer(x))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checkpointing(reentrant, dtype):
    def layer(q, k, v):
        return rt.attention(q, k, v, causal=True, dropout_p=0.2, ranks=2) * 2

    results = []
    for wrapped in (False, True):
        q, k, v = _inputs(dtype=dtype)
        torch.manual_seed(7)
        o = checkpoint(layer, q, k, v, use_reentrant=reentrant) if wrapped else layer(q, k, v)
        o.sum().backward()
        results.append((o, q.grad, k.grad, v.grad))
    for a, b in zip(*results):
        assert torch.equal(a, b)


def test_autocast_leaves_float64_alone():
    """As torch's own does: it would lose what it was chosen for; attention then says that it has none."""
    x = torch.randn(1, 5, 2, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ringspan.Unsupported, match="q.dtype .torch.float64. is not supported"):
        rt.attention(x, x, x)


def test_another_default_device():
    """What attention makes beside results lies on the CPU, whatever torch.set_default_device says."""
    x = torch.randn(1, 12, 2, 8, requires_grad=True)
    options = dict(dropout_p=0.25, dropout_seed=3, cu_seqlens=[0, 5, 12], causal=True, ranks=2)
    expected = rt.attention(x, x, x, **options)
    with torch.device("meta"):
        result = rt.attention(x, x, x, **options)
        rt.attention(x, x, x, dropout_p=0.25).sum().backward()
        rt.attention(x, x, x, lengths=[7])
        assert rt.Sharding("zigzag", tokens=12, ranks=2).shard(x, rank=1).device.type == "cpu"
    assert torch.equal(result, expected)


def test_autocast():
    q, k, v = _inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = rt.attention(q, k, v, causal=True)
    assert o.dtype == torch.bfloat16
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32
    assert_close(o, attention(q, k, v, mask_of(40, 40, causal=True))[0], torch.bfloat16)


def test_gradcheck_of_a_direction():
    """The derivative of the whole op against differences of its own forward."""
    q, k, v = _inputs(20)
    o = rt.attention(q, k, v, causal=True, softcap=3.0)
    d_out = torch.randn_like(o)
    o.backward(d_out)
    with torch.no_grad():
        for t in (q, k, v):
            direction = torch.randn_like(t)
            ends = [
                rt.attention(*(x + s * direction if x is t else x for x in (q, k, v)), causal=True, softcap=3.0) for s in (1e-2, -1e-2)
            ]
            difference = (((ends[0] - ends[1]) / 2e-2).double() * d_out).sum().item()
            gradient = (t.grad * direction).sum().item()
            assert abs(difference - gradient) < 1e-2 * max(1.0, abs(gradient))


def test_meta_tensors_give_shapes():
    q = torch.empty(2, 10, 4, 16, device="meta")
    o, lse = rt.attention(q, q, q, return_lse=True)
    assert o.shape == q.shape and lse.shape == (2, 4, 10) and o.device.type == "meta"


def test_module_with_weights_trains():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = torch.nn.Linear(32, 96)
            self.out = torch.nn.Linear(32, 32)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
            return self.out(rt.attention(q, k, v, causal=True).flatten(2))

    torch.manual_seed(0)
    model = Model()
    x = torch.randn(2, 30, 32)
    target = x.roll(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
