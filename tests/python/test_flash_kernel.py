"""kernel="flash_attn" and "flash_attn_3": calls of packages that are not here. Stand-ins have the arguments of their versions, take the
bounds of windows as the packages' sources do, and compute in float32 by torch; on the emulated device tensors are the CPU's."""

import inspect
import sys
import types

import pytest
import torch
from reference import assert_close, attention, mask_of

import ringspan
import ringspan.torch as rt
from ringspan.torch import _flash

KERNELS = ["flash_attn 2.6", "flash_attn 2.8", "flash_attn_3 2.8", "flash_attn_3 later"]


def _visible(calls, queries, keys, causal, left, right):
    calls[-1]["window"] = (causal, left, right)
    right = 0 if causal else right
    if calls[-1]["three"]:
        left, right = (-1 if left >= keys - 1 else left), (-1 if right >= queries - 1 else right)
        unbounded = queries - 1
    else:
        left, right = (-1 if left >= keys else left), (-1 if right >= keys else right)
        unbounded = keys
    corner = torch.arange(queries)[:, None] + keys - queries
    u = torch.arange(keys)[None, :]
    mask = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0 or right >= 0:
        mask &= u <= corner + (right if right >= 0 else unbounded)
        mask &= u >= corner - (left if left >= 0 else keys)
    assert mask.any(1).all()
    return mask


def _check(tensors, dtype):
    for t in tensors:
        assert t.dtype == dtype and t.dim() == 4 and t.stride(-1) == 1 and t.data_ptr() % 16 == 0 and not t.requires_grad


def _scores(q, k, scale, mask):
    k = k.float().repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bihd,bjhd->bhij", q.float() * scale, k).masked_fill(~mask, -torch.inf)


def _forward(calls, q, k, v, scale, causal, left, right):
    calls[-1].update(q=q, k=k)
    _check((q, k, v), q.dtype)
    s = _scores(q, k, scale, _visible(calls, q.shape[1], k.shape[1], causal, left, right))
    v = v.float().repeat_interleave(q.shape[2] // v.shape[2], 2)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v).to(q.dtype), s.logsumexp(-1)


def _backward(calls, dout, q, k, v, out, lse, dq, dk, dv, scale, causal, left, right, deterministic):
    calls[-1].update(deterministic=deterministic)
    _check((dout, q, k, v, out, dq, dk, dv), q.dtype)
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    p = (_scores(q, k, scale, _visible(calls, q.shape[1], k.shape[1], causal, left, right)) - lse[..., None]).exp()
    group, kv_heads = q.shape[2] // k.shape[2], k.shape[2]
    k_all, v_all = (t.float().repeat_interleave(group, 2) for t in (k, v))
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("bihd,bjhd->bhij", dout.float(), v_all) - delta) * scale
    dq.copy_(torch.einsum("bhij,bjhd->bihd", ds, k_all))
    dk.copy_(torch.einsum("bhij,bihd->bjhd", ds, q.float()).unflatten(2, (kv_heads, group)).sum(3))
    dv.copy_(torch.einsum("bhij,bihd->bjhd", p, dout.float()).unflatten(2, (kv_heads, group)).sum(3))


def _stand_in(version, calls):
    """The two functions of a version, with its arguments and results."""

    def begin(three=False):
        calls.append({"three": three})

    def nothing(*others):
        assert all(other in (None, 0.0, False, 0) for other in others)

    if version == "flash_attn 2.6":

        def forward(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax):
            begin(), nothing(dropout_p, softcap, alibi_slopes, return_softmax)
            out, lse = _forward(calls, q, k, v, softmax_scale, causal, *window_size)
            return out, q, k, v, out, lse, None, None

        def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                     deterministic, rng_state=None):  # fmt: skip
            begin(), nothing(dropout_p, softcap, alibi_slopes, rng_state)
            _backward(calls, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, *window_size, deterministic)

    elif version == "flash_attn 2.8":

        def forward(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax):
            begin(), nothing(dropout_p, softcap, alibi_slopes, return_softmax)
            return *_forward(calls, q, k, v, softmax_scale, causal, window_size_left, window_size_right), None, None

        def backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
                     softcap, alibi_slopes, deterministic, rng_state=None):  # fmt: skip
            begin(), nothing(dropout_p, softcap, alibi_slopes, rng_state)
            _backward(calls, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, window_size_left, window_size_right, deterministic)

        operator = lambda *args, **named: forward(*args, **named)  # noqa: E731
        operator._init_fn = forward  # as torch.library.custom_op leaves it
        return operator, backward
    elif version == "flash_attn_3 2.8":

        def forward(q, k, v, k_new, out, cu_seqlens_q, max_seqlen_q, q_descale, softmax_scale, causal, window_size=(-1, -1),
                    attention_chunk=0, softcap=0.0, num_splits=1):  # fmt: skip
            begin(True), nothing(k_new, out, cu_seqlens_q, max_seqlen_q, q_descale, attention_chunk, softcap)
            return *_forward(calls, q, k, v, softmax_scale, causal, *window_size), None, None

        def backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q, max_seqlen_q, dq, dk, dv, softmax_scale, causal,
                     window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0):  # fmt: skip
            begin(True), nothing(cu_seqlens_q, max_seqlen_q, softcap, sm_margin)
            _backward(calls, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, causal, *window_size, deterministic)

    else:

        def forward(q, k, v, k_new=None, out_=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
                    attention_chunk=0, softcap=0.0):  # fmt: skip
            begin(True), nothing(k_new, out_, attention_chunk, softcap)
            return *_forward(calls, q, k, v, softmax_scale, causal, window_size_left, window_size_right), None, None

        def backward(dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
                     window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0):  # fmt: skip
            begin(True), nothing(cu_seqlens_q, softcap, sm_margin)
            window = (window_size_left, window_size_right)
            _backward(calls, dout, q, k, v, out, softmax_lse, dq, dk, dv, softmax_scale, is_causal, *window, deterministic)

    return forward, backward


@pytest.fixture
def install(monkeypatch):
    """install(version) -> the list of calls"""

    def put(version):
        kernel = version.split()[0]
        module = types.ModuleType(_flash._MODULES[kernel])
        calls = []
        module._flash_attn_forward, module._flash_attn_backward = _stand_in(version, calls)
        if kernel == "flash_attn":
            monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        rt.forget_plans()
        return calls

    yield put
    rt.forget_plans()


def _inputs(n_q, n_k=None, heads=4, kv_heads=2, dim=16, dim_v=None, batch=1, dtype=torch.bfloat16):
    torch.manual_seed(0)
    shapes = (batch, n_q, heads, dim), (batch, n_k or n_q, kv_heads, dim), (batch, n_k or n_q, kv_heads, dim_v or dim)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def _run(tensors, kernel, **options):
    return rt.attention(*tensors, kernel=kernel, device="cuda-emulated", **options)


def _compare(kernel, tensors, mask, dtype=torch.bfloat16, **options):
    for t in tensors:
        t.grad = None
    o, lse = _run(tensors, kernel, return_lse=True, **options)
    assert [name for name, _ in rt.kernels().values()] == [f"attend_{kernel}", f"attend_backward_{kernel}"]
    reference = [t.detach().double().requires_grad_() for t in tensors]
    o_ref, lse_ref = attention(*reference, mask)
    assert_close(o, o_ref, dtype, "o")
    assert_close(lse, lse_ref, dtype, "lse")
    d_out = torch.randn_like(o)
    (o * d_out).sum().backward()
    (o_ref * d_out.double()).sum().backward()
    for name, t, ref in zip(("dq", "dk", "dv"), tensors, reference):
        assert (t.grad.double() - ref.grad).abs().max() <= 0.04 * ref.grad.abs().max() + 0.01, name  # delta is of a rounded o


@pytest.mark.parametrize("version", KERNELS)
def test_results_are_those_of_the_definition(install, version):
    kernel, calls = version.split()[0], install(version)
    for dtype in (torch.bfloat16, torch.float16):
        tensors = _inputs(37, batch=2, dtype=dtype)
        _compare(kernel, tensors, mask_of(37, 37, causal=True), dtype, causal=True)
        forward, backward = calls[-2:]
        assert forward["window"] == backward["window"] == (True, -1, -1) and backward["deterministic"] is True
        assert forward["q"].data_ptr() == tensors[0].data_ptr()  # no copy
    _compare(kernel, _inputs(33, 50), None)
    _compare(kernel, _inputs(30, 41), mask_of(30, 41, window=(5, 3)), window=(5, 3))
    assert calls[-1]["window"] == (False, 5, 3)
    _compare(kernel, _inputs(30, 41), mask_of(30, 41, True, (9, -1)), causal=True, window=(9, -1), deterministic=False)
    assert calls[-1]["window"] == (False, 9, 0) and calls[-1]["deterministic"] is False
    _compare(kernel, _inputs(41, 30), mask_of(41, 30, causal=True), causal=True)  # the first 11 queries see nothing
    _compare(kernel, _inputs(30, 41), mask_of(30, 41, True, top_left=True), pattern="causal@top_left")
    offsets = [0, 5, 5, 20, 41]
    _compare(kernel, _inputs(41), mask_of(41, 41, causal=True, cu_q=offsets), causal=True, cu_seqlens=offsets)


def test_dilated_segments_are_strided_views(install):
    calls = install("flash_attn 2.8")
    tensors = _inputs(64, kv_heads=4)
    o = _run(tensors, "flash_attn", pattern="dilated:32x2 & causal")
    assert any(call["k"].stride(1) == 2 * 4 * 16 for call in calls)
    o.sum().backward()
    on_cpu = [t.detach().float().requires_grad_() for t in tensors]
    expected = rt.attention(*on_cpu, pattern="dilated:32x2 & causal")
    expected.sum().backward()
    assert_close(o, expected.double(), torch.bfloat16)
    for t, e in zip(tensors, on_cpu):
        assert_close(t.grad, e.grad.double(), torch.bfloat16)


def test_bounds_that_flash_attention_2_takes_for_none(install):
    install("flash_attn 2.8")
    with pytest.raises(ringspan.Unsupported, match="wrong bounds where the first of 50 queries reaches 30 to the right, as far as there are keys"):
        _run(_inputs(50, 20), "flash_attn", pattern="causal@top_left")
    with pytest.raises(ringspan.Unsupported, match="wrong bounds"):
        _run(_inputs(50, 20), "flash_attn", window=(10, -1))
    install("flash_attn_3 2.8")
    _compare("flash_attn_3", _inputs(50, 20), mask_of(50, 20, True, top_left=True), pattern="causal@top_left")
    _compare("flash_attn_3", _inputs(50, 20), mask_of(50, 20, window=(10, -1)), window=(10, -1))


def test_what_it_cannot_do_is_refused_by_name(install):
    install("flash_attn 2.8")
    for tensors, options, message in [
        (_inputs(9, dtype=torch.float32), {}, "'flash_attn' cannot compute this: it is for 16-bit tensors"),
        (_inputs(9, dim_v=24), {}, r"head_dim_v \(24\) must equal head_dim \(16\)"),
        (_inputs(9, dim=12), {}, "must be positive and a multiple of 16 bytes"),
        (_inputs(9), dict(softcap=3.0), "no softcap"),
        (_inputs(9), dict(dropout_p=0.5), "dropout"),
        (_inputs(9), dict(pattern="dilated:4x1,8x2"), "more than one call"),
        (_inputs(9), dict(memory_budget=1 << 30), r"takes memory that is in no plan, so that nobody can keep it below memory_budget"),
    ]:
        with pytest.raises(ringspan.Unsupported, match=message):
            _run(tensors, "flash_attn", **options)
    with pytest.raises(ringspan.InvalidArgument, match="attend_backward_flash_attn has no gradient through lse"):
        _run(_inputs(9), "flash_attn", return_lse=True)[1].sum().backward()
    with pytest.raises(ringspan.Error, match="flash_attn"):
        rt.attention(*_inputs(9), kernel="flash_attn")  # on the CPU


def _shape(**changes):
    fields = dict(backward=True, deterministic=True, queries=8, keys=8, head_dim=256, head_dim_v=256, scale=1.0, low=None, high=None)
    return types.SimpleNamespace(**{**fields, **changes})


def test_limits_of_places_and_bands(install):
    install("flash_attn 2.8"), install("flash_attn_3 later")
    hopper, ada = (types.SimpleNamespace(on_host=False, compute_capability=cc) for cc in (90, 89))
    assert _flash.refusal("flash_attn", _shape(), ada) == ""
    assert "compute capability 9.0, not 8.9" in _flash.refusal("flash_attn_3", _shape(head_dim=64, head_dim_v=64), ada)
    assert "over 192 is not deterministic" in _flash.refusal("flash_attn_3", _shape(), hopper)
    assert _flash.refusal("flash_attn_3", _shape(deterministic=False), hopper) == ""
    assert "multiple of 8" in _flash.refusal("flash_attn", _shape(head_dim=20, head_dim_v=20), ada)
    assert "lower right corner" in _flash.refusal("flash_attn", _shape(high=-1), ada)
    assert "lower right corner" in _flash.refusal("flash_attn", _shape(low=1), ada)


def test_a_package_that_is_not_there_or_not_known(install, monkeypatch):
    for kernel in ("flash_attn", "flash_attn_3"):
        monkeypatch.setitem(sys.modules, _flash._MODULES[kernel], None)
        with pytest.raises(ringspan.Unsupported, match=f"'{kernel}' cannot compute this: the package {kernel} cannot be imported"):
            _run(_inputs(9), kernel)
    install("flash_attn 2.8")
    module = sys.modules["flash_attn.flash_attn_interface"]
    monkeypatch.setattr(module, "_flash_attn_backward", lambda dout, q, k, v, softmax_scale, causal, window_size: None)
    with pytest.raises(ringspan.Unsupported, match="no _flash_attn_backward with an argument out"):
        _run(_inputs(9), "flash_attn")
    with torch.no_grad():
        _run(_inputs(9), "flash_attn")  # which needs no backward pass


@pytest.mark.parametrize("name", ["_flash_attn_forward", "_flash_attn_backward"])
def test_errors_of_the_package_are_raised(install, monkeypatch, name):
    install("flash_attn 2.8")
    module, right = sys.modules["flash_attn.flash_attn_interface"], getattr(sys.modules["flash_attn.flash_attn_interface"], name)

    errors = [RuntimeError("no kernel image"), KeyboardInterrupt()]

    def broken(*_, **__):
        raise errors.pop(0)

    broken.__signature__ = inspect.signature(getattr(right, "_init_fn", right))
    monkeypatch.setattr(module, name, broken)
    with pytest.raises(ringspan.DeviceError, match="flash_attn failed: RuntimeError: no kernel image"):
        _run(_inputs(9), "flash_attn").sum().backward()
    with pytest.raises(KeyboardInterrupt):
        _run(_inputs(9), "flash_attn").sum().backward()
    monkeypatch.setattr(module, name, right)
    _run(_inputs(9), "flash_attn").sum().backward()  # the next call has a session of its own


def test_the_stream_is_torchs(monkeypatch):
    used = []
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: ("default", device))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: (handle, device))
    monkeypatch.setattr(torch.cuda, "stream", used.append)
    for handle in (1, 4096):
        _flash._on_stream(types.SimpleNamespace(on_host=False, device=1, stream=handle))
    assert used == [("default", torch.device("cuda:1")), (4096, torch.device("cuda:1"))]


def test_the_report_names_it():
    assert any(line.startswith("flash_attn, flash_attn_3: by the Python packages") for line in ringspan.device_report())
