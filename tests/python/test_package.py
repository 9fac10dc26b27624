"""What is installed: it works without torch, is typed, and prints and draws plans."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ringspan


def test_torch_is_not_imported():
    code = "import sys, ringspan; ringspan.plan(100, ranks=2); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_works_where_torch_is_missing():
    code = """
import sys
sys.modules["torch"] = None
import numpy as np, ringspan
x = np.ones((1, 5, 2, 8), np.float32)
assert ringspan.attention(x, x, x, causal=True, ranks=2).shape == x.shape
try:
    ringspan.torch
except ImportError:
    pass
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_of_torch_is_linked():
    core = Path(ringspan._core.__file__)
    linked = subprocess.run(["ldd", core], check=True, capture_output=True, text=True).stdout
    assert "torch" not in linked and "ringspan" not in linked.replace(str(core), "")


def test_a_wheel_needs_no_headers_of_the_distribution():
    """What a wheel is compiled from includes, besides the system and itself, what pip fetches and the part of fmt in the sources."""
    root = Path(__file__).parents[2]
    folders = [folder for folder in (root / "src").iterdir() if folder.name not in ("io", "oracle")]
    sources = [path for folder in (*folders, root / "python" / "src") for path in folder.rglob("*") if path.suffix in (".h", ".cc", ".inc")]
    included = set()
    for path in sources:
        if not path.name.endswith(("_test.cc", "_bench.cc", "_harness.h")):
            included |= set(re.findall(r"^\s*#\s*include\s*<([^>]*/[^>]*)>", path.read_text(), re.MULTILINE))
    foreign = {name for name in included if not name.startswith(("ringspan/", "nanobind/", "sys/", "linux/", "arpa/", "netinet/"))}
    assert foreign == {"fmt/format.h", "nlohmann/json.hpp"}


def test_is_typed():
    folder = Path(ringspan.__file__).parent
    assert (folder / "py.typed").exists()
    stub = Path(ringspan._core.__file__).parent / "_core.pyi"
    if not stub.exists():
        pytest.skip("not an installed package")
    assert "class Pattern" in stub.read_text() and "def make_plan" in stub.read_text()


def test_type_checkers_know_the_arguments():
    """Those of the signature, but for what the overloads have themselves."""
    import inspect

    pytest.importorskip("torch")
    pytest.importorskip("typing_extensions")
    from ringspan.torch import attention
    from ringspan.torch._typing import Options

    assert set(Options.__annotations__) == set(inspect.signature(attention).parameters) - {"q", "k", "v", "return_lse", "unknown"}


def test_version():
    assert ringspan.__version__.count(".") == 2


def test_a_plan_prints_and_draws_itself():
    plan = ringspan.plan(24, ranks=3, causal=True, heads=2, strategy="ring")
    assert "ring" in str(plan) and plan.strategy == "ring"
    page = plan._repr_html_()
    assert "<svg" in page and "zigzag" in page
    large = ringspan.plan(10**6, ranks=64, rank=5, pattern="dilated:2048x1,4096x2,8192x4")
    assert "<svg" not in large._repr_html_()
    assert large.pairs > 0 and large.memory()["q"] > 0
    whole = sum(ringspan.plan(24, ranks=3, rank=r, causal=True, heads=2, strategy="ring").pairs for r in range(3))
    assert whole == 2 * 24 * 25 // 2


@pytest.mark.parametrize(
    "options",
    [
        dict(ranks=4, rank=2, heads=8, kv_heads=2, dtype="bfloat16", causal=True, window=(100, 0), scale=0.3, lengths=[900]),
        dict(ranks=3, cu_seqlens=[0, 5, 1000], sharding="striped", strategy="ring", bucket_rows=32, threads=3, backward=False),
        dict(pattern="dilated:128x1,256x2", device="cuda", host_tensors=True, heads=2),
    ],
)
def test_a_plan_is_copied_and_pickled(options):
    plan = ringspan.plan(1000, **options)
    assert copy.copy(plan) is plan and copy.deepcopy([plan])[0] is plan
    again = pickle.loads(pickle.dumps(plan))
    assert again.to_json() == plan.to_json() and str(again) == str(plan)
    assert again == plan and hash(again) == hash(plan)


def test_plans_are_equal_where_their_content_is():
    plan = ringspan.plan(64, ranks=2, causal=True, threads=1)
    same = ringspan.plan(64, ranks=2, causal=True, threads=1)
    assert plan == same and len({plan, same}) == 1
    for change in (dict(rank=1), dict(threads=2), dict(kernel="reference"), dict(strategy=plan.strategy), dict(scale=0.5)):
        assert plan != ringspan.plan(64, **{**dict(ranks=2, causal=True, threads=1), **change}), change
    assert plan != plan.to_json()


def test_a_plan_names_the_source_of_its_sizes(monkeypatch, tmp_path):
    plan = ringspan.plan(4096, ranks=4, strategy="ring", bucket_rows=64, tile=(96, 128))
    text = str(plan)
    assert "tiles of 96 x 128 (given)" in text and "buckets   64 rows (given)" in text
    assert "(default)" in text.split("attend_backward")[1].split("\n")[0]
    with pytest.raises(ringspan.InvalidArgument, match=r"the keys of a tile \(100\) must be 0 or a multiple of"):
        ringspan.plan(4096, backward_tile=(96, 100))
    broken = tmp_path / "tune.json"
    broken.write_text("{")
    monkeypatch.setenv("RINGSPAN_TUNE_FILE", str(broken))
    with pytest.raises(ringspan.InvalidArgument, match="tune file .*tune.json: is not JSON"):
        ringspan.plan(4096)


def test_a_budget_is_kept_or_refused():
    plan = ringspan.plan(65536, ranks=4, causal=True, strategy="ring", memory_budget=400 << 20)
    assert sum(plan.memory(backward=True).values()) <= 400 << 20
    with pytest.raises(ringspan.OutOfBudget, match="smallest"):
        ringspan.plan(65536, ranks=4, causal=True, strategy="ring", memory_budget=1 << 20)


def test_patterns():
    pattern = ringspan.Pattern("causal & window:3,0")
    assert pattern.causal and pattern.window == (3, 0) and str(pattern) == "causal&window:3,0"
    assert ringspan.Pattern(str(pattern)) == pattern
    assert ringspan.Pattern("dilated:geometric(4,2,3)").branches == [(4, 1), (8, 2), (16, 4)]
    with pytest.raises(ValueError, match="window"):
        ringspan.Pattern("window:5")
    pattern.top_left = True
    for again in (copy.deepcopy(pattern), pickle.loads(pickle.dumps(pattern))):
        assert again == pattern and again.top_left and again is not pattern


def test_shardings():
    sharding = ringspan.Sharding("zigzag", tokens=10, ranks=2)
    assert sharding.positions(0).tolist() == [0, 1, 2, 8, 9]
    assert sharding.rows(1) == 5
    documents = ringspan.Sharding.of_documents("zigzag", [0, 4, 10], ranks=2)
    assert documents.positions(0).tolist() == [0, 3, 4, 5, 9]
    assert sorted(np.concatenate([documents.positions(r) for r in range(2)])) == list(range(10))
    with pytest.raises(ringspan.InvalidArgument, match="zigzak"):
        ringspan.Sharding("zigzak", tokens=10, ranks=2)
    with pytest.raises(ringspan.InvalidArgument, match=r"rank \(2\)"):
        sharding.positions(2)


def _dense(q, k, v, mask):
    s = np.einsum("bihd,bjhd->bhij", q.astype(np.float64), k.astype(np.float64)) / np.sqrt(q.shape[-1])
    s = np.where(mask, s, -np.inf)
    lse = np.log(np.exp(s).sum(-1))
    return np.einsum("bhij,bjhd->bihd", np.exp(s - lse[..., None]), v.astype(np.float64)), lse


@pytest.mark.parametrize("ranks", [None, 3])
@pytest.mark.parametrize("layout", ["bshd", "bhsd", "thd"])
def test_numpy(ranks, layout):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 33, 4, 16)).astype(np.float32) for _ in range(3))
    mask = np.tril(np.ones((33, 33), bool))
    expected, expected_lse = _dense(q, k, v, mask)

    def arrange(x):
        return {"bshd": x, "bhsd": x.swapaxes(1, 2), "thd": x[0]}[layout]

    o, lse = ringspan.attention(*map(arrange, (q, k, v)), causal=True, layout=layout, ranks=ranks, return_lse=True)
    assert np.abs(o - arrange(expected)).max() < 1e-5
    assert np.abs(lse - (expected_lse[0] if layout == "thd" else expected_lse)).max() < 1e-5
    d_out = np.ones_like(o)
    dq, dk, dv = ringspan.attention_backward(d_out, *map(arrange, (q, k, v)), o, lse, causal=True, layout=layout, ranks=ranks)
    step = 1e-3  # a directional derivative by differences, in float64
    for gradient, which in ((dq, 0), (dk, 1), (dv, 2)):
        direction = rng.standard_normal(q.shape)
        values = []
        for sign in (1, -1):
            inputs = [x.astype(np.float64) for x in (q, k, v)]
            inputs[which] = inputs[which] + sign * step * direction
            values.append(_dense(*inputs, mask)[0].sum())
        expected = (values[0] - values[1]) / (2 * step)
        assert abs((gradient * arrange(direction)).sum() - expected) < 1e-3 * max(1.0, abs(expected))


def test_numpy_refuses_by_name():
    x = np.ones((1, 5, 2, 8))
    with pytest.raises(ringspan.Unsupported, match="float64"):
        ringspan.attention(x, x, x)
    x = x.astype(np.float32)
    with pytest.raises(ringspan.InvalidArgument, match="head_dim"):
        ringspan.attention(x, x[..., :4], x)
    with pytest.raises(ringspan.InvalidArgument, match="thd"):
        ringspan.attention(x, x, x, layout="thd")
    with pytest.raises(ringspan.Unsupported, match="k is a masked array"):
        ringspan.attention(x, np.ma.masked_array(x, mask=x > 0), x)
    for ranks in (0, -1):
        with pytest.raises(ringspan.InvalidArgument, match=f"ranks .{ranks}. must be an integer of at least 1"):
            ringspan.attention(x, x, x, ranks=ranks)
    for options, text in (
        (dict(strategy="rong"), "unknown strategy 'rong'"), (dict(causal="no"), "causal .'no'."), (dict(seed=-1), "seed .-1."),
        (dict(cu_seqlens=[0, 2.5, 5]), r"cu_seqlens.1. .2.5."), (dict(scale="a"), "scale .'a'. must be a number"),
    ):  # fmt: skip
        with pytest.raises(ringspan.InvalidArgument, match=text):
            ringspan.attention(x, x, x, **options)


@pytest.mark.parametrize("name, shape", [("alibi_slopes", (1, 4)), ("alibi_slopes", (7, 4)), ("alibi_slopes", (3, 1, 4)), ("sinks", (3, 4))])
def test_numpy_vectors_have_the_shape_that_is_read(name, shape):
    """What is not (heads), or for slopes (batch, heads), would be read beyond its end."""
    x = np.ones((3, 5, 4, 8), np.float32)
    with pytest.raises(ringspan.InvalidArgument, match=f"{name} has shape"):
        ringspan.attention(x, x, x, **{name: np.ones(shape, np.float32)})


def test_numpy_slopes_per_item():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 9, 2, 8)).astype(np.float32)
    slopes = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    o = ringspan.attention(x, x, x, alibi_slopes=slopes)
    for b in range(3):
        assert np.array_equal(o[b : b + 1], ringspan.attention(*[x[b : b + 1]] * 3, alibi_slopes=slopes[b]))


def test_numpy_of_another_byte_order():
    x = np.random.default_rng(0).standard_normal((1, 9, 2, 8)).astype(np.float32)
    o, lse = ringspan.attention(x, x, x, causal=True, return_lse=True)
    swapped = x.astype(x.dtype.newbyteorder("S"))
    assert np.array_equal(ringspan.attention(swapped, x, swapped, causal=True), o)
    grads = ringspan.attention_backward(np.ones_like(o), x, x, x, o, lse, causal=True)
    again = ringspan.attention_backward(np.ones_like(o).astype(swapped.dtype), swapped, x, x, o, lse.astype(swapped.dtype), causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(grads, again))


def test_a_plan_takes_the_arguments_of_attention():
    """By name; those that are left out decide nothing of a plan, or are about tensors."""
    import inspect

    pytest.importorskip("torch")
    from ringspan.torch import attention

    left_out = {"q", "k", "v", "alibi_slopes", "layout", "return_lse", "group", "deadline", "dropout_seed", "deterministic", "unknown"}
    assert set(inspect.signature(attention).parameters) - left_out <= set(inspect.signature(ringspan.plan).parameters)
    assert ringspan.plan(1e6, ranks=4, head_dim=np.int64(32)).rank == 0
    shorter = ringspan.plan(100, batch=2, causal=True, lengths=[10, 20], scale=0.5)
    assert shorter.pairs == 10 * 11 // 2 + 20 * 21 // 2
    for options, text in (
        (dict(memory_budget="8GB"), "memory_budget .'8GB'. must be an integer"), (dict(dtype="float64"), "float64"), (dict(ranks=0), "ranks .0."),
        (dict(rank=1.5), "rank .1.5."), (dict(heads="8"), "heads .'8'. must be an integer"), (dict(alibi=1.0), "alibi .1.0. must be True or False"),
    ):  # fmt: skip
        with pytest.raises(ringspan.InvalidArgument, match=text):
            ringspan.plan(64, **options)


def test_threads_are_set():
    before = ringspan.num_threads()
    try:
        ringspan.set_num_threads(3)
        assert ringspan.num_threads() == 3
        with pytest.raises(ringspan.InvalidArgument, match=r"threads \(0\) must be an integer of at least 1"):
            ringspan.set_num_threads(0)
        with pytest.raises(ringspan.InvalidArgument, match=r"threads \(5000\) must be in \[1, 4096\]"):
            ringspan.set_num_threads(5000)
        assert ringspan.num_threads() == 3
    finally:
        ringspan.set_num_threads(None)
    assert ringspan.num_threads() == before
