"""scaled_dot_product_attention: as torch's users call it."""

import pytest
import torch

import dense
from ringspan import Unsupported
from ringspan.fronts.sdpa import scaled_dot_product_attention

# Before 2.5 torch has no enable_gqa, and gives NaN to a row that sees nothing.
LIKE_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 5)
B, H, NQ, NK, D = 3, 4, 11, 17, 8  # no two are equal


def compare(q, k, v, seen, *, name, scale=None, **arguments):
    """Against float64, and against torch."""

    def reference(q, k, v):
        o, lse = dense.attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seen, scale=scale)
        return o.transpose(1, 2), lse

    out = scaled_dot_product_attention(q, k, v, scale=scale, **arguments)
    dense.check(out, (q, k, v), reference, name=name)
    if LIKE_TORCH:
        dense.close(f"{name} against torch", out, torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale, **arguments))


def inputs(kv_heads=H, n_k=NK):
    return dense.tensors((B, H, NQ, D), (B, kv_heads, n_k, D), (B, kv_heads, n_k, D + 4))


def test_causal_begins_at_the_upper_left():
    compare(*inputs(), dense.band(NQ, NK, causal=True, top_left=True), name="more keys", is_causal=True)
    compare(*inputs(n_k=5), dense.band(NQ, 5, causal=True, top_left=True), name="fewer keys", is_causal=True)
    compare(*inputs(n_k=NQ), dense.band(NQ, NQ, causal=True), name="square", is_causal=True)


def test_full_scale_and_gqa():
    compare(*inputs(), None, name="full")
    compare(*inputs(), None, name="scale", scale=0.3)
    compare(*inputs(kv_heads=2), dense.band(NQ, NK, causal=True, top_left=True), name="gqa", is_causal=True, enable_gqa=True)


@pytest.mark.parametrize("kind", ["prefix", "right padding", "left padding", "holes", "window", "documents", "random", "one row empty"])
def test_boolean_masks(kind):
    j, i = torch.arange(NK)[None], torch.arange(NQ)[:, None]
    if kind == "prefix":
        mask = (j <= i) | (j < 6)
    elif kind == "right padding":
        mask = (j < torch.tensor([17, 9, 9])[:, None])[:, None, None]
    elif kind == "left padding":
        mask = (j >= torch.tensor([0, 9, 3])[:, None])[:, None, None] & dense.band(NQ, NK, causal=True)
    elif kind == "holes":
        mask = (torch.rand(B, NK, generator=torch.Generator().manual_seed(0)) < 0.6)[:, None, None]
    elif kind == "window":
        mask = dense.band(NQ, NK, 3, 2, top_left=True)
    elif kind == "documents":
        mask = dense.packed([0, 3, 4, 11], [0, 8, 8, 17])
    elif kind == "random":
        mask = torch.rand(B, 1, NQ, NK, generator=torch.Generator().manual_seed(1)) < 0.5
    else:
        mask = dense.band(NQ, NK, causal=True, top_left=True).clone()
        mask[4] = False
    compare(*inputs(), mask, name=kind, attn_mask=mask)


def test_an_item_that_sees_nothing():
    q, k, v = inputs()
    mask = torch.ones(B, 1, NQ, NK, dtype=torch.bool)
    mask[1] = False
    compare(q, k, v, mask, name="an item without keys", attn_mask=mask)


@pytest.mark.parametrize("items", [0, 1, B])
def test_nothing_is_seen(items):
    q, k, v = inputs()
    mask = torch.ones(B, 1, NQ, NK, dtype=torch.bool)
    mask[:items] = False
    with torch.autocast("cpu", torch.bfloat16):
        out = scaled_dot_product_attention(q, k, v, mask)
    assert out.dtype == torch.bfloat16
    assert (out[:items] == 0).all() and (out[items:] != 0).any() == (items < B)
    out.float().sum().backward()
    assert all((t.grad[:items] == 0).all() for t in (q, k, v))


def test_a_batch_of_nothing():
    q, k, v = (t.detach()[:0].requires_grad_() for t in inputs())
    seen = torch.ones(NQ, NK, dtype=torch.bool)
    for mask in (None, seen, ~seen, seen.expand(0, 1, NQ, NK)):
        out = scaled_dot_product_attention(q, k, v, mask)
        out.sum().backward()
        assert out.shape == (0, H, NQ, D + 4) and q.grad.shape == q.shape


def test_no_queries():
    q, k, v = inputs()
    out = scaled_dot_product_attention(q[:, :, :0], k, v)
    assert out.shape == (*q.shape[:2], 0, v.shape[-1])


def test_other_batch_dimensions():
    q, k, v = dense.tensors((2, 3, H, NQ, D), (2, 3, H, NK, D), (2, 3, H, NK, D))
    dense.close("5-D", scaled_dot_product_attention(q, k, v), torch.nn.functional.scaled_dot_product_attention(q, k, v))
    q, k, v = q[0, 0], k[0, 0], v[0, 0]
    mask = torch.rand(1, NQ, NK, generator=torch.Generator().manual_seed(2)) < 0.5
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
    dense.close("3-D", scaled_dot_product_attention(q, k, v, mask), expected)


def test_dropout_is_random_and_unbiased():
    torch.manual_seed(0)
    q, k, v = (t.detach() for t in inputs())
    exact = scaled_dot_product_attention(q, k, v)
    draws = torch.stack([scaled_dot_product_attention(q, k, v, dropout_p=0.3) for _ in range(400)])
    assert not torch.equal(draws[0], draws[1])
    assert (draws.mean(0) - exact).abs().max() < 0.25


def test_bfloat16():
    q, k, v = (t.detach().bfloat16() for t in inputs())
    out = scaled_dot_product_attention(q, k, v, is_causal=True)
    assert out.dtype == torch.bfloat16
    expected, _ = dense.attention(*(t.transpose(1, 2) for t in (q, k, v)), dense.band(NQ, NK, causal=True, top_left=True))
    dense.close("bfloat16", out, expected.transpose(1, 2), tolerance=1e-2)


def test_refusals():
    q, k, v = inputs()
    with pytest.raises(Unsupported, match="boolean mask"):
        scaled_dot_product_attention(q, k, v, torch.zeros(NQ, NK))
    with pytest.raises(ValueError, match="exclude each other"):
        scaled_dot_product_attention(q, k, v, torch.ones(NQ, NK, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k[:, :2], v[:, :2])
    with pytest.raises(Unsupported, match=r"expand\(\)"):
        scaled_dot_product_attention(q, k[:1], v[:1])
