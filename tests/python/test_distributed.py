"""Ranks that are processes: results are those of one rank; sub-groups, meshes, DDP, FSDP2, compiled graphs."""

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from reference import assert_close, mask_of
from reference import attention as dense
from worlds import run_ranks

import ringspan
import ringspan.torch as rt
from ringspan import CommError
from ringspan.torch import _collectives, _transport

HERE = Path(__file__).parent


def _whole(n=61, dtype=torch.float32, heads=4, kv_heads=2, dim=16, batch=2):
    torch.manual_seed(0)
    q, d_out = (torch.randn(batch, n, heads, dim).to(dtype) for _ in range(2))
    k, v = (torch.randn(batch, n, kv_heads, dim).to(dtype) for _ in range(2))
    return q, k, v, d_out


def _compare(rank, ranks, cases):
    """Each case against float64, and the same bits as the simulated ranks."""
    for dtype, kind, options in cases:
        q, k, v, d_out = _whole(dtype=dtype)
        sharding = rt.Sharding(kind, tokens=q.shape[1], ranks=ranks)
        local = [sharding.shard(t, rank=rank).requires_grad_() for t in (q, k, v)]
        o, lse = rt.attention(*local, causal=True, group=dist.group.WORLD, sharding=kind, return_lse=True, **options)
        o.backward(sharding.shard(d_out, rank=rank))
        whole = [t.clone().requires_grad_() for t in (q, k, v)]
        o_sim = rt.attention(*whole, causal=True, ranks=ranks, sharding=kind, **options)
        o_sim.backward(d_out)
        reference = [t.double().requires_grad_() for t in (q, k, v)]
        o_ref, lse_ref = dense(*reference, mask_of(q.shape[1], q.shape[1], causal=True))
        o_ref.backward(d_out.double())
        what = f"{dtype} {kind} {options}"
        assert torch.equal(o, sharding.shard(o_sim.detach(), rank=rank)), what
        assert_close(o, sharding.shard(o_ref.detach(), rank=rank), dtype, what)
        assert_close(lse, sharding.shard(lse_ref.detach(), rank=rank, dim=2), dtype, what)
        for t, s, e in zip(local, whole, reference):
            assert torch.equal(t.grad, sharding.shard(s.grad, rank=rank)), what
            assert_close(t.grad, sharding.shard(e.grad, rank=rank), dtype, what)
    return True


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_results_are_those_of_one_rank(ranks):
    strategies = ["auto", "ring", "exchange", "all-gather", "ulysses", "pass-q", "local"]
    cases = [(torch.float32, "zigzag", dict(strategy=s)) for s in strategies]
    cases += [(torch.bfloat16, kind, dict(strategy="ring")) for kind in ("contiguous", "zigzag", "striped", "block_striped:5")]
    cases += [(torch.float16, "striped", dict(strategy="exchange")), (torch.float32, "zigzag", dict(dropout_p=0.3, dropout_seed=9))]
    cases[-1:] = []  # dropout has no dense reference: see _dropout
    run_ranks(ranks, _compare, cases)


def _dropout(rank, ranks):
    q, k, v, d_out = _whole()
    sharding = rt.Sharding("zigzag", tokens=61, ranks=ranks)
    local = [sharding.shard(t, rank=rank).requires_grad_() for t in (q, k, v)]
    torch.manual_seed(rank)  # ranks draw different seeds; that of rank 0 counts, in backward too
    o = rt.attention(*local, dropout_p=0.3, group=dist.group.WORLD)
    o.backward(sharding.shard(d_out, rank=rank))
    torch.manual_seed(0)
    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = rt.attention(*whole, dropout_p=0.3)
    expected.backward(d_out)
    assert_close(o, sharding.shard(expected.detach(), rank=rank))
    for t, e in zip(local, whole):
        assert_close(t.grad, sharding.shard(e.grad, rank=rank))


def test_dropout():
    run_ranks(3, _dropout)


def _seeds(rank, ranks):
    """All 64 bits of a seed count, as torch.seed() returns them."""
    q, k, v, _ = _whole()
    sharding = rt.Sharding("zigzag", tokens=61, ranks=ranks)
    results = []
    drawn = [torch.seed()]
    dist.broadcast_object_list(drawn)
    for seed in (2**64 - 1, 2**63 - 1, *drawn):
        o = rt.attention(*(sharding.shard(t, rank=rank) for t in (q, k, v)), dropout_p=0.3, dropout_seed=seed, group=dist.group.WORLD)
        results.append(sharding.unshard(o, group=dist.group.WORLD))
        if rank == 0:
            assert_close(results[-1], rt.attention(q, k, v, dropout_p=0.3, dropout_seed=seed).double())
            assert_close(results[-1], rt.attention(q, k, v, dropout_p=0.3, dropout_seed=seed, ranks=2).double())
    assert not torch.equal(results[0], results[1])


def test_seeds_have_64_bits():
    run_ranks(2, _seeds)


def _checkpointed(rank, ranks):
    """Forward is run again in backward, under another number than at first; a graph that is kept runs backward twice."""
    from torch.utils.checkpoint import checkpoint

    q, k, v, _ = _whole()
    sharding = rt.Sharding("zigzag", tokens=61, ranks=ranks)
    local = [sharding.shard(t, rank=rank).requires_grad_() for t in (q, k, v)]

    def layer(q, k, v):
        return rt.attention(rt.attention(q, k, v, causal=True, group=dist.group.WORLD), k, v, group=dist.group.WORLD)

    expected = torch.autograd.grad(layer(*local).square().sum(), local)
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        for reentrant in (False, True) if function is layer else (False,):
            o = checkpoint(function, *local, use_reentrant=reentrant)
            for _ in range(1 if reentrant else 2):
                if reentrant:
                    for t in local:
                        t.grad = None
                    o.square().sum().backward()
                    grads = [t.grad for t in local]
                else:
                    grads = torch.autograd.grad(o.square().sum(), local, retain_graph=True)
                for grad, e in zip(grads, expected):
                    assert_close(grad, e.double())


def test_checkpointing():
    run_ranks(2, _checkpointed)


def _sinks(rank, ranks):
    q, k, v, d_out = _whole()
    sharding = rt.Sharding("zigzag", tokens=61, ranks=ranks)
    sinks = torch.linspace(-1, 1, 4).requires_grad_()
    local = [sharding.shard(t, rank=rank) for t in (q, k, v)]
    rt.attention(*local, sinks=sinks, group=dist.group.WORLD).backward(sharding.shard(d_out, rank=rank))
    dist.all_reduce(sinks.grad)  # like any other weight's: shares add up
    whole = torch.linspace(-1, 1, 4).requires_grad_()
    rt.attention(q, k, v, sinks=whole).backward(d_out)
    assert_close(sinks.grad, whole.grad)


def test_gradients_of_sinks_add_up():
    run_ranks(3, _sinks)


def _documents_and_empty_ranks(rank, ranks):
    offsets = [0, 1, 30, 61]
    q, k, v, d_out = (t[:1] for t in _whole())
    for kind in ("contiguous", rt.Sharding.of_documents("zigzag", offsets, ranks=ranks), "explicit:;0-60" + ";" * (ranks - 2)):
        sharding = kind if isinstance(kind, rt.Sharding) else rt.Sharding(kind, tokens=61, ranks=ranks)
        local = [sharding.shard(t, rank=rank)[0].requires_grad_() for t in (q, k, v)]
        o = rt.attention(*local, causal=True, cu_seqlens=offsets, layout="thd", group=dist.group.WORLD, sharding=sharding)
        o.backward(sharding.shard(d_out, rank=rank)[0])
        reference = [t.double().requires_grad_() for t in (q, k, v)]
        o_ref, _ = dense(*reference, mask_of(61, 61, causal=True, cu_q=offsets))
        o_ref.backward(d_out.double())
        assert_close(o, sharding.shard(o_ref.detach(), rank=rank)[0])
        for t, e in zip(local, reference):
            assert_close(t.grad, sharding.shard(e.grad, rank=rank)[0])


def test_documents_and_ranks_without_tokens():
    run_ranks(3, _documents_and_empty_ranks)


def _mesh(rank, ranks):
    """2 x 2: data parallel times context parallel; each context group has a sequence of its own."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    context = mesh["context"]
    q, k, v, _ = _whole()
    item = mesh["data"].get_local_rank()
    place = context.get_local_rank()
    sharding = rt.Sharding("zigzag", tokens=61, ranks=2)
    local = [sharding.shard(t[item : item + 1], rank=place) for t in (q, k, v)]
    o = rt.attention(*local, causal=True, group=context)
    again = rt.attention(*local, causal=True, group=context.get_group())
    expected = rt.attention(q, k, v, causal=True)[item : item + 1]
    assert torch.equal(o, again)
    assert_close(o, sharding.shard(expected, rank=place))
    with pytest.raises(ValueError, match="2 dimensions"):
        rt.attention(*local, group=mesh)


def test_a_dimension_of_a_mesh():
    run_ranks(4, _mesh)


def _compiled_with_sharding(rank, ranks):
    sharding = rt.Sharding("zigzag", tokens=61, ranks=ranks)
    x = _whole()[0]

    def step(x):
        local = sharding.shard(x, rank=rank)
        o = rt.attention(local, local, local, causal=True, group=dist.group.WORLD, sharding=sharding)
        loss = sharding.mean_loss(o.square().mean((-1, -2)), group=dist.group.WORLD)
        return loss, sharding.unshard(o, group=dist.group.WORLD) + sharding.positions(rank).sum()

    results = []
    for function in (step, torch.compile(step, backend="aot_eager")):
        leaf = x.clone().requires_grad_()
        loss, whole = function(leaf)
        (loss + whole.sum()).backward()
        results.append((loss, whole, leaf.grad))
    for plain, compiled in zip(*results):
        assert torch.equal(plain, compiled)


def test_graphs_go_on_after_sharding():
    run_ranks(2, _compiled_with_sharding)


def test_the_end_waits_for_threads_that_have_tensors_of_collectives():
    tensor = torch.zeros(1)
    thread_has = [_collectives._own(tensor)]
    assert thread_has[0].data_ptr() == tensor.data_ptr()
    holder = threading.Timer(0.2, thread_has.clear)
    holder.start()
    _collectives.wait_for_threads()
    assert not thread_has
    holder.join()


class Model(torch.nn.Module):
    """Two layers with rotary positions; the group is None for one rank."""

    def __init__(self, group=None, width=32, heads=2):
        super().__init__()
        self.group, self.heads = group, heads
        self.embed = torch.nn.Embedding(50, width)
        self.qkv = torch.nn.ModuleList([torch.nn.Linear(width, 3 * width) for _ in range(2)])
        self.out = torch.nn.ModuleList([torch.nn.Linear(width, width) for _ in range(2)])
        self.head = torch.nn.Linear(width, 50)

    def rotate(self, x, positions):
        half = x.shape[-1] // 2
        angle = positions[:, None, None] * (100.0 ** -(torch.arange(half) / half))
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for qkv, out in zip(self.qkv, self.out):
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            x = x + out(rt.attention(q, k, v, causal=True, group=self.group).flatten(2))
        return self.head(x)


def _loss(model, tokens, rank, ranks, group):
    n = tokens.shape[1]
    sharding = rt.Sharding("zigzag", tokens=n, ranks=ranks)
    logits = model(sharding.shard(tokens, rank=rank), sharding.positions(rank))
    labels = sharding.next_labels(tokens, rank=rank)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    if group is None:
        return losses.sum() / (labels != -100).sum()
    return sharding.mean_loss(losses, group=group, labels=labels)


def _train(rank, ranks, how):
    group = dist.group.WORLD
    tokens = torch.randint(0, 50, (2, 31), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    alone = Model()
    torch.manual_seed(5)
    model = Model(group)
    if how == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(model)
    elif how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (ranks,))
        for layer in (*model.qkv, *model.out):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        wrapped = model
    elif how == "compile":
        torch._dynamo.reset()
        wrapped = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = torch.optim.SGD(alone.parameters(), lr=0.5)
    for step in range(3):
        optimizer.zero_grad()
        reference.zero_grad()
        loss = _loss(wrapped, tokens, rank, ranks, group)
        expected = _loss(alone, tokens, 0, 1, None)
        assert abs(loss.item() - expected.item()) < 1e-5, (step, loss.item(), expected.item())
        # DDP and FSDP average the gradients over the ranks; the mean's shares are to be summed.
        (loss * ranks if how != "compile" else loss).backward()
        expected.backward()
        if how == "compile":
            for p in model.parameters():
                dist.all_reduce(p.grad)
        for (name, p), e in zip(model.named_parameters(), alone.parameters()):
            grad = p.grad.full_tensor() if how == "fsdp" else p.grad
            assert_close(grad, e.grad.double(), what=f"{how} step {step} {name}")
        optimizer.step()
        reference.step()
    return True


@pytest.mark.parametrize("how", ["ddp", "fsdp", "compile"])
def test_training_is_that_of_one_rank(how):
    if how == "fsdp" and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("fully_shard works on CPUs from torch 2.6 on")
    run_ranks(2, _train, how)


def test_torchrun():
    script = HERE / "torchrun_script.py"
    for ranks in (2, 3, 4):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(script)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=dict(os.environ, OMP_NUM_THREADS="1"))
        assert done.returncode == 0, done.stderr
        assert f"{ranks} ranks agree" in done.stdout


def _collects(rank, ranks):
    """The group's own collectives between our calls do not mix with our messages."""
    q, k, v, _ = _whole()
    sharding = rt.Sharding("zigzag", tokens=61, ranks=ranks)
    local = [sharding.shard(t, rank=rank) for t in (q, k, v)]
    expected = None
    for step in range(5):
        request = dist.isend(torch.full((4,), float(rank)), (rank + 1) % ranks)
        o = rt.attention(*local, causal=True, group=dist.group.WORLD)
        received = torch.empty(4)
        dist.recv(received, (rank - 1) % ranks)
        request.wait()
        assert received[0].item() == (rank - 1) % ranks
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == ranks
        assert expected is None or torch.equal(o, expected)
        expected = o


def test_messages_of_the_user_on_the_same_group():
    run_ranks(3, _collects)


def _remade(rank, ranks):
    local, files = [rt.Sharding("zigzag", tokens=61, ranks=ranks).shard(t, rank=rank) for t in _whole()[:3]], []
    for step in range(4):
        group = dist.new_group(list(range(ranks)))
        rt.attention(*local, group=group)
        dist.destroy_process_group(group)
        files.append(len(os.listdir("/proc/self/fd")))
    assert files[-1] <= files[0], files
    assert len(_transport._transports) == 1  # of the latest one, until there is another


def test_groups_come_and_go():
    run_ranks(2, _remade)


def _destroyed(rank, ranks):
    """torch's threads end with the group: one that still runs while the interpreter goes down can abort the process."""
    q, k, v, _ = _whole()
    group = dist.new_group(list(range(ranks)))
    sharding = rt.Sharding("zigzag", tokens=61, ranks=ranks)
    local = [sharding.shard(t, rank=rank).requires_grad_() for t in (q, k, v)]
    rt.attention(*local, group=group).sum().backward()
    late = rt.attention(*local, group=group).sum()
    dist.all_reduce(torch.ones(1), group=group)
    assert any(thread.name.startswith("ringspan-") for thread in threading.enumerate())
    gone = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    assert gone() is None
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ringspan-")]
    with pytest.raises(CommError, match="the process group was destroyed"):
        late.backward()


def test_a_destroyed_group_is_let_go():
    run_ranks(2, _destroyed)


def _shapes(rank, ranks):
    """More problems than are kept, again and again, some forgotten."""
    for turn in range(2):
        for n in (1, 7, 20, 33, 64, 65):
            torch.manual_seed(n)
            x = torch.randn(1, n, 2, 8)
            sharding = rt.Sharding("zigzag", tokens=n, ranks=ranks)
            q = sharding.shard(x, rank=rank).requires_grad_()
            o = rt.attention(q, q, q, causal=True, group=dist.group.WORLD)
            o.sum().backward()
            whole = x.clone().requires_grad_()
            rt.attention(whole, whole, whole, causal=True).sum().backward()
            assert_close(q.grad, sharding.shard(whole.grad, rank=rank))
        rt.forget_plans()


def test_many_shapes():
    run_ranks(3, _shapes)


def _outside(rank, ranks):
    """A sub-group where it is passed by a rank outside of it."""
    group = dist.new_group([0, 1])
    sharding = rt.Sharding("zigzag", tokens=61, ranks=2)
    if rank < 2:
        q, _, _, _ = _whole()
        local = sharding.shard(q, group=group)
        return rt.attention(local, local, local, group=group).shape[1]
    q = torch.zeros(1, 8, 4, 16)
    for call in (lambda: rt.attention(q, q, q, group=group), lambda: sharding.shard(q, group=group), lambda: sharding.unshard(q, group=group)):
        with pytest.raises(ringspan.InvalidArgument, match="this process is not a member of the group"):
            call()
    return 0


def test_a_rank_outside_of_a_group():
    assert sum(run_ranks(3, _outside)) == 61


def _empty_batch(rank, ranks):
    import ringspan

    q = torch.zeros(0, 5, 4, 16, requires_grad=True)
    o, lse = rt.attention(q, q, q, group=dist.group.WORLD, return_lse=True)
    (o.sum() + lse.sum()).backward()
    assert o.shape == q.shape == q.grad.shape
    with pytest.raises(ringspan.CommError, match="batch: 0 on rank 0, 1 on rank 1"):
        rt.attention(*[torch.zeros(rank, 5, 4, 16)] * 3, group=dist.group.WORLD)
    return True


def test_a_batch_of_nothing():
    assert all(run_ranks(2, _empty_batch))


def _refused(rank, ranks):
    """What no plan can do is refused on every rank, and the group goes on."""
    import ringspan

    q, k, v, _ = _whole()
    sharding = rt.Sharding("zigzag", tokens=61, ranks=ranks)
    local = [sharding.shard(t, rank=rank) for t in (q, k, v)]
    with pytest.raises(ringspan.OutOfBudget, match="smallest"):
        rt.attention(*local, group=dist.group.WORLD, strategy="ring", memory_budget=1000)
    with pytest.raises(ringspan.InvalidArgument, match="60 tokens over 2 ranks"):
        rt.attention(*local, group=dist.group.WORLD, sharding=rt.Sharding("zigzag", tokens=60, ranks=2))
    with pytest.raises(ringspan.Unsupported, match="float64"):
        rt.attention(*(t.double() for t in local), group=dist.group.WORLD)
    try:
        from torch.distributed.tensor import DTensor, Shard
    except ImportError:  # before torch 2.5
        from torch.distributed._tensor import DTensor, Shard

    mesh = dist.init_device_mesh("cpu", (ranks,))
    spread = DTensor.from_local(local[0], mesh, [Shard(1)])
    with pytest.raises(ringspan.Unsupported, match="to_local"):
        rt.attention(spread, spread, spread)
    return rt.attention(*local, group=dist.group.WORLD).shape[1]


def test_refusals():
    assert sum(run_ranks(3, _refused)) == 61
