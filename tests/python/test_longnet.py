"""LongNet modules against a dense float64 computation written from the definition, on one rank, simulated ranks and processes."""

import copy
import math

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import ringspan  # noqa: E402
from ringspan import plan  # noqa: E402
from ringspan.longnet import PAPER, Branches, DilatedAttention, LongNetBlock, MultiheadDilatedAttention, geometric, rotary  # noqa: E402
from ringspan.torch import Sharding  # noqa: E402
from worlds import run_ranks  # noqa: E402


def multiplicity(tokens, heads, branches, causal):
    """How often query i of head h sees key j: the sum over the branches."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    seen = torch.zeros(heads, tokens, tokens, dtype=torch.float64)
    for w, r in zip(branches.segment_lengths, branches.dilation_rates):
        for h in range(heads):
            seen[h] += (i // w == j // w) & (i % w % r == h % r) & (j % w % r == h % r)
    return seen * (j <= i) if causal else seen


def dense(q, k, v, branches, causal):
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    seen = multiplicity(q.shape[1], q.shape[2], branches, causal)
    weight = seen * torch.exp(torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1]))
    total = weight.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", weight / total.where(total > 0, torch.ones_like(total)), v)


def inputs(seed, tokens, heads=4, kv_heads=2, head_dim=16, batch=2):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, tokens, h, head_dim) for h in (heads, kv_heads, kv_heads))
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("causal", (False, True))
@pytest.mark.parametrize("ranks", (None, 3))
@pytest.mark.parametrize("tokens", (1, 64, 131))
def test_dilated_attention_is_the_definition(tokens, ranks, causal):
    branches = Branches((16, 48, 128), (1, 3, 8))
    q, k, v = inputs(tokens, tokens)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    o = DilatedAttention(branches.segment_lengths, branches.dilation_rates, ranks=ranks)(q, k, v, causal)
    expected = dense(*exact, branches, causal)
    torch.testing.assert_close(o.double(), expected, atol=1e-5, rtol=1e-5)
    d_out = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    o.backward(d_out)
    expected.backward(d_out.double())
    for ours, theirs in zip((q, k, v), exact):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=2e-5, rtol=1e-4)


def test_one_branch_that_spans_all_is_causal_attention():
    q, k, v = inputs(1, 100, kv_heads=4)
    o = DilatedAttention((100,), (1,))(q, k, v, True)
    expected = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
    torch.testing.assert_close(o, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_softmax_scale_and_options_of_the_call_are_used():
    q, k, v = inputs(2, 60)
    half = DilatedAttention((20, 60), (1, 2), 0.5)(q, k, v)
    torch.testing.assert_close(half, DilatedAttention((20, 60), (1, 2))(q, k, v, scale=0.5))
    assert not torch.allclose(half, DilatedAttention((20, 60), (1, 2))(q, k, v))
    o, lse = DilatedAttention((20, 60), (1, 2))(q, k, v, return_lse=True)
    assert lse.shape == (2, 4, 60)


def test_dropout_is_for_training_only():
    q, k, v = inputs(3, 50)
    module = DilatedAttention((50,), (1,), attention_dropout=0.5)
    dropped = module(q, k, v, dropout_seed=1)
    assert not torch.allclose(dropped, module(q, k, v, dropout_seed=2))
    module.eval()
    torch.testing.assert_close(module(q, k, v), DilatedAttention((50,), (1,))(q, k, v))


def test_presets():
    assert str(PAPER) == "2048x1, 4096x2, 8192x4, 16384x6, 32768x12"
    assert geometric(2048, 2, 3) == Branches((2048, 4096, 8192), (1, 2, 4))
    assert geometric(512, 4, tokens=65536).segment_lengths == (512, 2048, 8192, 32768, 131072)
    assert geometric(512, 4, tokens=512) == Branches((512,), (1,))
    assert geometric(64, 2, 2).pattern(causal=True) == "dilated:64x1,128x2@longnet & causal"
    # The cost is linear: in each branch a query has at most `segment` keys.
    for segment, tokens in ((1, 9), (2, 1025), (256, 4096), (256, 65536), (256, 1 << 20)):
        branches = geometric(segment, 2, tokens=tokens)
        pairs = plan(tokens, pattern=branches.pattern(), heads=1).pairs
        assert pairs < segment * (2 * tokens + len(branches.dilation_rates))


def test_tensors_given_to_a_module_are_its_own():
    sinks, slopes = torch.nn.Parameter(torch.zeros(4)), torch.tensor([0.5, 0.25, 0.125, 0.0625])
    module = DilatedAttention((8,), (1,), sinks=sinks, alibi_slopes=slopes)
    assert dict(module.named_parameters()).keys() == {"sinks"} and dict(module.named_buffers()).keys() == {"alibi_slopes"}
    assert module.state_dict().keys() == {"sinks", "alibi_slopes"}
    q, k, v = inputs(9, 30)
    module(q, k, v).sum().backward()
    assert sinks.grad.abs().max() > 0
    given = {"sinks": torch.ones(4), "alibi_slopes": slopes / 2}
    copied = copy.deepcopy(module)
    copied.load_state_dict(given)
    assert torch.equal(copied(q, k, v), DilatedAttention((8,), (1,))(q, k, v, **given))
    assert torch.equal(module(q, k, v, **given), copied(q, k, v))  # those of the call count
    assert torch.equal(sinks, torch.zeros(4))
    assert "attention.attention.sinks" in dict(LongNetBlock(32, 4, (8,), (1,), sinks=sinks).named_parameters())


def test_positions_may_be_of_numpy_or_a_list():
    x = inputs(10, 6)[0].detach()
    expected = rotary(x, torch.arange(6))
    for positions in (ringspan.Sharding("zigzag", tokens=6, ranks=1).positions(0), [0, 1, 2, 3, 4, 5], torch.arange(6.0).expand(2, 6)):
        assert torch.equal(rotary(x, positions), expected)


def test_rotary_depends_on_distances_only():
    q, k, _ = (t.detach()[:, :1, :2] for t in inputs(4, 8))

    def score(i, j):
        return (rotary(q, torch.tensor([i])) * rotary(k, torch.tensor([j]))).sum(-1)

    for shift in (1, 1000, 10**8):  # exact positions, also far out
        torch.testing.assert_close(score(17, 5), score(17 + shift, 5 + shift), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(score(17, 5), score(17, 6))


def test_multihead_is_its_parts_and_can_be_copied():
    torch.manual_seed(5)
    module = MultiheadDilatedAttention(32, 4, (1, 2), (8, 24), num_kv_heads=2, rope_base=1e4)
    x = torch.randn(2, 50, 32)
    q = rotary(module.q_proj(x).view(2, 50, 4, 8), torch.arange(50)).double()
    k = rotary(module.k_proj(x).view(2, 50, 2, 8), torch.arange(50)).double()
    v = module.v_proj(x).view(2, 50, 2, 8).double()
    o = dense(q, k, v, Branches((8, 24), (1, 2)), True).float().flatten(-2)
    expected = module.out_proj(module.norm(o))
    out, weights = module(x, x, x, True)
    assert weights is None
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(copy.deepcopy(module)(x, is_causal=True)[0], out)


def block(group=None, sharding="zigzag"):
    torch.manual_seed(6)
    return torch.nn.ModuleList(
        copy.deepcopy(LongNetBlock(32, 4, (16, 64), (1, 4), num_kv_heads=2, group=group, sharding=sharding)) for _ in range(2)
    )


def run(blocks, x, positions=None, **options):
    for layer in blocks:
        x = layer(x, positions=positions, **options)
    return x


def test_block_does_not_look_ahead():
    blocks, x = block(), torch.randn(1, 100, 32, generator=torch.Generator().manual_seed(7))
    changed = x.clone()
    changed[:, 60:] += 1.0
    a, b = run(blocks, x), run(blocks, changed)
    assert torch.equal(a[:, :60], b[:, :60])
    assert not torch.allclose(a[:, 60:], b[:, 60:])


TOKENS = 101


def _train(rank, ranks):
    group = dist.group.WORLD
    sharding = Sharding("zigzag", tokens=TOKENS, ranks=ranks)
    blocks = block(group, sharding)
    whole = torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(8))
    local = sharding.shard(whole, rank=rank).requires_grad_()
    positions = None if ranks == 2 else sharding.positions(rank)  # with a Sharding the block finds them itself
    out = run(blocks, local, positions)
    loss = sharding.mean_loss(out.square().mean(-1), group=group)
    loss.backward()
    for parameter in blocks.parameters():
        dist.all_reduce(parameter.grad)
    whole = [sharding.unshard(t, group=group) for t in (out.detach(), local.grad)]
    return [t.numpy() for t in (loss.detach(), *whole, *(parameter.grad for parameter in blocks.parameters()))]


@pytest.mark.parametrize("ranks", (2, 3))
def test_ranks_train_as_one_process(ranks):
    blocks = block()
    x = torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(8)).requires_grad_()
    out = run(blocks, x)
    loss = out.square().mean()
    loss.backward()
    for got in run_ranks(ranks, _train):
        ours_loss, ours_out, ours_dx, *weights = map(torch.from_numpy, got)
        torch.testing.assert_close(ours_loss, loss.detach(), atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(ours_out, out.detach(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours_dx, x.grad, atol=1e-6, rtol=1e-4)
        for ours, parameter in zip(weights, blocks.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, atol=1e-5, rtol=1e-4)


def _run_on_a_group_of_the_call(rank, ranks):
    sharding = Sharding("zigzag", tokens=TOKENS, ranks=ranks)
    whole = torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(8))
    out = run(block(), sharding.shard(whole, rank=rank), group=dist.group.WORLD, sharding=sharding)
    return sharding.unshard(out.detach(), group=dist.group.WORLD).numpy()


def test_positions_are_those_of_the_sharding_that_a_call_gives():
    x = torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(8))
    expected = run(block(), x).detach()
    for got in run_ranks(2, _run_on_a_group_of_the_call):
        torch.testing.assert_close(torch.from_numpy(got), expected, atol=1e-5, rtol=1e-5)


def _compiled_long_net(rank, ranks):
    sharding = Sharding("zigzag", tokens=64, ranks=ranks)
    x = sharding.shard(torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(5)), rank=rank)
    for group in (dist.group.WORLD, dist.device_mesh.init_device_mesh("cpu", (ranks,))):
        torch._dynamo.reset()
        torch.manual_seed(1)
        blocks = torch.nn.Sequential(*(LongNetBlock(32, 4, (8, 16), (1, 2), group=group, sharding=sharding) for _ in range(2)))
        assert torch.equal(torch.compile(blocks, backend="aot_eager", fullgraph=True)(x), blocks(x))


def test_long_net_compiles_over_ranks():
    run_ranks(2, _compiled_long_net)
