"""yunchang's modules, over processes, as its own test calls them."""

import inspect

import pytest
import torch
import torch.distributed as dist

import dense
import worlds
from ringspan import Unsupported
from ringspan.fronts import yunchang
from test_ring_flash_attn import check_local

H, HK, D = 6, 2, 8


def layout(impl, ud, rd, n, low):
    """Which tokens yunchang's communication makes of each rank's chunk: Ulysses gathers the chunks of a ring's shard in order, the
    ring's function reads that shard as its own kind says. Returns positions by rank."""
    position = torch.arange(n)
    result = []
    for rank in range(ud * rd):
        ring, ulysses = (rank // ud, rank % ud) if low else (rank % rd, rank // rd)
        if impl == "strip":
            shard = position[ring::rd]
        elif impl == "zigzag":
            parts = position.chunk(2 * rd)
            shard = torch.cat((parts[ring], parts[2 * rd - 1 - ring]))
        else:
            shard = position.chunk(rd)[ring]
        result.append(shard.chunk(ud)[ulysses])
    return result


def hybrid(rank, p, ud, rd, low):
    yunchang.set_seq_parallel_pg(ud, rd, rank, p, use_ulysses_low=low)
    assert dist.get_world_size(yunchang.PROCESS_GROUP.ULYSSES_PG) == ud
    assert dist.get_world_size(yunchang.PROCESS_GROUP.RING_PG) == rd
    n = 4 * p
    whole = dense.tensors((2, n, H, D), (2, n, HK, D), (2, n, HK, D))
    for impl in ("basic", "zigzag", "strip"):
        mine = layout(impl, ud, rd, n, low)[rank]
        extract = yunchang.EXTRACT_FUNC_DICT[impl]
        q, k, v = (extract(t, rank, world_size=p, rd=rd, ud=ud).detach().clone().requires_grad_() for t in whole)
        assert torch.equal(q, whole[0][:, mine])
        attention = yunchang.LongContextAttention(ring_impl_type=impl)
        for causal in (False, True):
            out = attention(q, k, v, causal=causal, softmax_scale=0.3)
            seen = dense.band(n, n, causal=causal)
            with torch.no_grad():
                _, lse = dense.attention(*whole, seen, scale=0.3)  # yunchang returns no lse
            check_local(f"rank {rank}: {impl} {ud}x{rd} low={low} causal={causal}", out, lse[..., mine], (q, k, v), whole, seen, mine, scale=0.3)
        (qkv,) = dense.tensors((2, n // p, 3, H, D), seed=rank)
        packed = yunchang.LongContextAttentionQKVPacked(ring_impl_type=impl)(qkv, causal=True)
        assert torch.equal(packed, attention(*qkv.unbind(2), causal=True))


def ulysses(rank, p):
    n = 4 * p
    whole = dense.tensors((2, n, H, D), (2, n, HK, D), (2, n, HK, D))
    mine = torch.arange(n).chunk(p)[rank]
    q, k, v = (t.detach()[:, mine].requires_grad_() for t in whole)
    with pytest.raises(ValueError, match=r"softcap \(-1\) must be 0, or finite and at least"):
        yunchang.UlyssesAttention(dist.group.WORLD)(q, k, v, causal=True, softcap=-1.0)
    out = yunchang.UlyssesAttention(dist.group.WORLD)(q, k, v, causal=True, softcap=2.0)
    seen = dense.band(n, n, causal=True)
    with torch.no_grad():
        _, lse = dense.attention(*whole, seen, softcap=2.0)
    check_local(f"rank {rank}: ulysses", out, lse[..., mine], (q, k, v), whole, seen, mine, softcap=2.0)


def everything(rank, p):
    for ud, rd, low in ((2, 2, True), (2, 2, False), (4, 1, True), (1, 4, True)):
        hybrid(rank, p, ud, rd, low)
    ulysses(rank, p)


def test_over_four_ranks():
    worlds.run_ranks(4, everything)


def test_signatures_and_refusals():
    tail = ["dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic", "return_attn_probs", "args"]
    for name in ("LongContextAttention", "UlyssesAttention"):
        assert list(inspect.signature(getattr(yunchang, name).forward).parameters) == ["self", "query", "key", "value", *tail]
    assert list(inspect.signature(yunchang.LongContextAttention).parameters) == [
        "scatter_idx", "gather_idx", "ring_impl_type", "use_pack_qkv", "use_sync", "attn_type", "attn_processor"]  # fmt: skip
    assert list(inspect.signature(yunchang.set_seq_parallel_pg).parameters) == [
        "sp_ulysses_degree", "sp_ring_degree", "rank", "world_size", "use_ulysses_low"]  # fmt: skip
    with pytest.raises(ValueError, match="set_seq_parallel_pg"):
        yunchang.LongContextAttention()
    with pytest.raises(Unsupported, match="quantized"):
        yunchang.UlyssesAttention(attn_type=yunchang.AttnType.SAGE_FP8)
    with pytest.raises(Unsupported, match="scatter_idx"):
        yunchang.UlyssesAttention(scatter_idx=1)
    with pytest.raises(ValueError, match="multiple of"):
        yunchang.set_seq_parallel_pg(2, 2, 0, 6)
