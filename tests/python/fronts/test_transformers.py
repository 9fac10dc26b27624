"""Hugging Face transformers: small random Llama, Qwen2, Qwen3, Gemma2 and Mistral models, against their own eager or sdpa attention."""

import copy
import unittest.mock

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist

import dense
import worlds
from ringspan import Unsupported

transformers = pytest.importorskip("transformers")

from ringspan.fronts import transformers as front  # noqa: E402
from ringspan.fronts.ring_flash_attn import substitute_hf_flash_attn, update_ring_flash_attn_params, use_ring_attn  # noqa: E402

SMALL = dict(vocab_size=61, hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
             max_position_embeddings=128, pad_token_id=0, initializer_range=0.15)  # scores far from equal; fmt: skip
B, N = 2, 24


def make(kind, attention, **more):
    torch.manual_seed(0)
    name = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma2", "gpt_oss": "GptOss"}[kind]
    if kind in ("qwen3", "gemma2", "gpt_oss"):
        more["head_dim"] = 8
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **more})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def pair(kind, reference="sdpa", **more):
    front.register()
    ours, theirs = make(kind, "ringspan", **more), make(kind, reference, **more)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def text(seed=0, batch=B, n=N):
    return torch.randint(1, SMALL["vocab_size"], (batch, n), generator=torch.Generator().manual_seed(seed))


def compare(ours, theirs, rows=None, **arguments):
    """Logits, of `rows` only where given, and gradients of all weights."""
    labels = arguments["input_ids"].clone()
    if rows is not None:
        labels[~rows] = -100
    results = [model(labels=labels, **arguments) for model in (ours, theirs)]
    logits = [result.logits if rows is None else result.logits[rows] for result in results]
    dense.close("logits", *logits)
    dense.close("loss", results[0].loss, results[1].loss)
    for result in results:
        result.loss.backward()
    compare_gradients(ours, theirs)


def compare_gradients(ours, theirs):
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters()):
        dense.close(f"gradient of {name}", a.grad, b.grad)
        a.grad = b.grad = None


WINDOWED = dict(use_sliding_window=True, sliding_window=5, max_window_layers=1, layer_types=["full_attention", "sliding_attention"])


@pytest.mark.parametrize("kind, more", [("llama", {}), ("qwen2", {}), ("qwen2", WINDOWED), ("qwen3", {}), ("mistral", dict(sliding_window=6))])
def test_models(kind, more):
    ours, theirs = pair(kind, **more)
    compare(ours, theirs, input_ids=text())
    for side in ("right", "left", "both"):
        keep = torch.ones(B, N, dtype=torch.long)
        if side != "left":
            keep[0, -7:] = 0
        if side != "right":
            keep[1, :5] = 0
        positions = (keep.cumsum(-1) - 1).clamp(min=0)
        rows = keep.bool()
        compare(ours, theirs, rows=rows & torch.cat((torch.zeros(B, 1, dtype=torch.bool), rows[:, :-1]), 1) if side != "right" else rows,
                input_ids=text(1), attention_mask=keep, position_ids=positions)  # fmt: skip


@pytest.mark.parametrize("kind, more", [("llama", {}), ("qwen2", WINDOWED)])
def test_packed_by_position_ids(kind, more):
    ours, theirs = pair(kind, **more)
    positions = torch.cat([torch.arange(n) for n in (7, 1, 16)])[None]
    compare(ours, theirs, input_ids=text(batch=1), position_ids=positions, use_cache=False)  # with a cache transformers ignores packing
    second = torch.cat([torch.arange(n) for n in (12, 12)])[None]
    compare(ours, theirs, input_ids=text(), position_ids=torch.cat((positions, second)), use_cache=False)
    plain = ours(text(batch=1), use_cache=False).logits
    assert not torch.allclose(plain, ours(text(batch=1), position_ids=positions, use_cache=False).logits)


TINY = dict(vocab_size=50, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20, initializer_range=0.2)


@torch.no_grad()
@pytest.mark.parametrize("name, config", [
    ("BertForMaskedLM", TINY),
    ("BartForConditionalGeneration", dict(vocab_size=50, d_model=24, encoder_layers=2, decoder_layers=2, encoder_attention_heads=3,
                                          decoder_attention_heads=3, encoder_ffn_dim=20, decoder_ffn_dim=20, init_std=0.2)),
    ("GPT2LMHeadModel", dict(vocab_size=50, n_embd=24, n_layer=2, n_head=3, initializer_range=0.2)),
    ("ViTModel", dict(TINY, image_size=16, patch_size=4)),
    ("Llama4ForCausalLM", dict(TINY, num_attention_heads=4, num_key_value_heads=2, head_dim=8, intermediate_size_mlp=20,
                               attention_chunk_size=5, num_hidden_layers=4, num_local_experts=2, pad_token_id=0)),
])  # fmt: skip
def test_other_families(name, config):
    """Encoders, cross attention, images, chunks (a mask function that is evaluated)."""
    front.register()
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    ours = cls._from_config(copy.deepcopy(cls.config_class(**config)), attn_implementation="ringspan").eval()
    theirs = cls._from_config(copy.deepcopy(cls.config_class(**config)), attn_implementation="sdpa").eval()
    assert (ours.config._attn_implementation, theirs.config._attn_implementation) == ("ringspan", "sdpa")
    theirs.load_state_dict(ours.state_dict())
    ids = torch.randint(3, 50, (2, 13), generator=torch.Generator().manual_seed(0))
    keep = torch.ones_like(ids)
    keep[0, 8:] = 0
    inputs = {"pixel_values": torch.randn(2, 3, 16, 16)} if name == "ViTModel" else {"input_ids": ids, "attention_mask": keep}
    if name.startswith("Bart"):
        inputs["decoder_input_ids"] = ids[:, :7]
    out, expected = ours(**inputs)[0], theirs(**inputs)[0]
    if name in ("BertForMaskedLM", "GPT2LMHeadModel", "Llama4ForCausalLM"):
        out, expected = out[keep.bool()], expected[keep.bool()]
    dense.close(name, out, expected)


@torch.no_grad()
@pytest.mark.parametrize("name, config", [
    ("BloomForCausalLM", dict(vocab_size=50, hidden_size=24, n_layer=1, n_head=3)),
    ("CodeGenForCausalLM", dict(vocab_size=50, n_embd=32, n_layer=1, n_head=4, rotary_dim=4, n_positions=64, n_ctx=64)),
    ("XGLMForCausalLM", dict(vocab_size=50, d_model=24, num_layers=1, attention_heads=3, ffn_dim=20)),
    ("MptForCausalLM", dict(vocab_size=50, d_model=24, n_layers=1, n_heads=3, max_seq_len=64)),
    ("LongformerForMaskedLM", dict(TINY, attention_window=[4, 4])),
    ("BigBirdForMaskedLM", dict(TINY, attention_type="original_full")),
])  # fmt: skip
def test_models_that_compute_scores_themselves_are_told(name, config):
    front.register()
    cls = getattr(transformers, name)
    model = cls._from_config(cls.config_class(**config), attn_implementation="ringspan").eval()
    ids = torch.randint(3, 50, (2, 12), generator=torch.Generator().manual_seed(0))
    for keep in (None, torch.ones_like(ids).index_fill(1, torch.tensor([0]), 0)):
        with pytest.raises(Unsupported, match="computes scores itself.*attn_implementation='eager'"):
            model(ids, attention_mask=keep)


def test_a_mask_is_no_tensor():
    mask, x = front.register().mask(1, 4, 4), torch.ones(1, 1, 4, 4)
    operations = [
        lambda: x + mask, lambda: mask + x, lambda: mask[:, :, 0], lambda: mask < 0, lambda: mask == 0, lambda: mask != 0, lambda: 1.0 - mask,
        lambda: ~mask, lambda: x.masked_fill(mask, 0.0), lambda: torch.where(mask, x, x), lambda: mask.to(x.dtype), lambda: mask.size(),
    ]  # fmt: skip
    for operation in operations:
        with pytest.raises(Unsupported, match="attn_implementation='eager'"):
            operation()
    assert not hasattr(mask, "to") and getattr(mask, "dtype", None) is None
    assert mask == mask and mask != None and mask in {mask} and copy.deepcopy(mask).shape == mask.shape  # noqa: E711


@pytest.mark.parametrize("padded, fullgraph", [(True, False), (False, True)])
def test_compile(padded, fullgraph):
    """One graph where the mask is plainly causal; otherwise it breaks around the mask."""
    ours, theirs = pair("llama", num_hidden_layers=1)
    keep = torch.ones(B, N, dtype=torch.long)
    if padded:
        keep[0, -6:] = 0
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=fullgraph)
    arguments = dict(attention_mask=keep) if padded else {}
    labels = text().masked_fill(keep == 0, -100)
    results = [model(text(), labels=labels, **arguments) for model in (compiled, theirs)]
    dense.close("logits", *(result.logits[keep.bool()] for result in results))
    for result in results:
        result.loss.backward()
    compare_gradients(ours, theirs)


def test_soft_cap():
    ours, theirs = pair("gemma2", reference="eager", sliding_window=5, query_pre_attn_scalar=3, attn_logit_softcapping=0.5)
    compare(ours, theirs, input_ids=text())


def test_sinks():
    ours, theirs = pair("gpt_oss", reference="eager", sliding_window=5, num_local_experts=2, num_experts_per_tok=1)
    with torch.no_grad():
        for layer, other in zip(ours.model.layers, theirs.model.layers):
            layer.self_attn.sinks.copy_(torch.linspace(-2, 2, 6))
            other.self_attn.sinks.copy_(torch.linspace(-2, 2, 6))
    compare(ours, theirs, input_ids=text())


def test_bidirectional():
    ours, theirs = pair("llama", is_causal=False)
    keep = torch.ones(B, N, dtype=torch.long)
    keep[0, :9] = 0
    compare(ours, theirs, rows=keep.bool(), input_ids=text(), attention_mask=keep)


def test_four_dimensional_mask():
    ours, theirs = pair("llama")
    mask = torch.rand(B, 1, N, N, generator=torch.Generator().manual_seed(0)) < 0.5
    mask |= torch.eye(N, dtype=torch.bool)
    compare(ours, theirs, input_ids=text(), attention_mask=mask)


def test_a_mask_that_sees_nothing():
    q, k, v = dense.tensors((B, 4, N, 8), (B, 2, N, 8), (B, 2, N, 8))
    attention = front.Front(None, "zigzag", "auto").attention
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = attention(torch.nn.Identity(), q, k, v, torch.zeros(B, 1, N, N, dtype=torch.bool), s_aux=torch.zeros(4))
    assert o.dtype == torch.bfloat16 and o.shape == (B, N, 4, 8) and (o == 0).all()
    o.float().sum().backward()
    assert all((t.grad == 0).all() for t in (q, k, v))


def test_unknown_mask_functions_are_evaluated():
    from transformers.masking_utils import create_causal_mask

    ours, theirs = pair("llama")
    embeds = torch.zeros(B, N, SMALL["hidden_size"])
    masks = [
        create_causal_mask(config=model.config, inputs_embeds=embeds, attention_mask=None, past_key_values=None,
                           or_mask_function=lambda b, h, i, j: j < 6)
        for model in (ours, theirs)
    ]  # fmt: skip
    assert masks[0].structure is None and len(masks[0].parts) == 1
    q, k, v = dense.tensors(*[(B, 6, N, 8)] * 3)
    out, _ = front._registered["ringspan"].attention(ours.model.layers[0].self_attn, q, k, v, masks[0])
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, masks[1])
    dense.close("prefix", out.transpose(1, 2), expected)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind, more", [("llama", {}), ("qwen2", WINDOWED)])
def test_generate(kind, more, side, cache):
    ours, theirs = pair(kind, **more)
    keep = torch.ones(B, N, dtype=torch.long)
    if side == "left":
        keep[0, :6] = 0
    outputs = [
        model.generate(text(), attention_mask=keep, max_new_tokens=6, do_sample=False, cache_implementation=cache, return_dict_in_generate=True,
                       output_logits=True, eos_token_id=None, disable_compile=True)
        for model in (ours, theirs)
    ]  # fmt: skip
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    for a, b in zip(outputs[0].logits, outputs[1].logits):
        dense.close("logits", a, b)


@torch.no_grad()
@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("kind, more", [("llama", {}), ("qwen2", WINDOWED)])
def test_a_static_cache_is_one_graph(kind, more, side):
    """For the prompt one, for all tokens after it another."""
    ours, theirs = pair(kind, **more)
    keep = torch.ones(B, N, dtype=torch.long)
    if side == "left":
        keep[0, :6] = 0
    options = dict(attention_mask=keep, max_new_tokens=8, do_sample=False, eos_token_id=None, disable_compile=True)
    expected = theirs.generate(text(), **options)
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(ours.forward, backend=counted, fullgraph=True)
    with unittest.mock.patch.object(ours, "forward", compiled):
        found = ours.generate(text(), past_key_values=transformers.StaticCache(config=ours.config, max_cache_len=N + 20), **options)
    torch._dynamo.reset()
    assert torch.equal(found, expected)
    assert counted.frame_count == 2


def test_packed_by_cu_seq_lens():
    """Also where the model makes a mask, which does not know of them (use_cache)."""
    ours, theirs = pair("llama")
    offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = dict(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=7, max_length_k=7)
    ids = text(batch=1, n=12)
    expected = theirs(ids, position_ids=positions, use_cache=False).logits
    for use_cache in (False, True):
        dense.close("logits", ours(ids, position_ids=positions, use_cache=use_cache, **packed).logits, expected)
    for padding in (slice(0, 2), slice(-2, None)):
        keep = torch.ones_like(ids)
        keep[0, padding] = 0
        with pytest.raises(Unsupported, match="cu_seq_lens_q together with padding"):
            ours(ids, position_ids=positions, attention_mask=keep, use_cache=False, **packed)
    with pytest.raises(ValueError, match="other sequences than those of position_ids"):
        ours(ids, position_ids=positions, use_cache=False, **{**packed, "cu_seq_lens_q": torch.tensor([0, 6, 12], dtype=torch.int32)})


def test_gradient_checkpointing():
    ours, theirs = pair("llama")
    ours.gradient_checkpointing_enable()
    ours.train(), theirs.train()
    compare(ours, theirs, input_ids=text(), use_cache=False)


def test_refusals():
    ours, _ = pair("llama")
    with pytest.raises(Unsupported, match="boolean 4-D mask"):
        ours(text(), attention_mask=torch.zeros(B, 1, N, N))
    layer, attention = ours.model.layers[0].self_attn, front._registered["ringspan"].attention
    q, k, v = dense.tensors(*[(B, 6, N, 8)] * 3)
    for name in ("position_bias", "head_mask", "cache", "indexer"):
        with pytest.raises(Unsupported, match=name):
            attention(layer, q, k, v, None, **{name: torch.zeros(1)})
    with pytest.raises(Unsupported, match="probabilities are never formed"):
        attention(layer, q, k, v, None, output_attentions=True)
    with pytest.raises(Unsupported, match="without a mask"):
        attention(layer, q[:, :, :5], k, v, None)
    with pytest.raises(ValueError, match=r"softcap \(-1\) must be 0, or finite and at least"):
        attention(layer, q, k, v, None, softcap=-1.0)
    with pytest.raises(ValueError, match="needs ranks"):
        front._registered["ringspan"].shard(text())


# ---- over ranks ----


def train(rank, p, kind, sharding, packed, padded, more):
    """Two steps of SGD on p ranks and in one process with sdpa: logits, losses, gradients."""
    n = 8 * p
    ours, theirs = make(kind, "sdpa", **more), make(kind, "sdpa", **more)
    theirs.load_state_dict(ours.state_dict())
    ranked = front.register(group=dist.group.WORLD, sharding=sharding)
    ours.set_attn_implementation("ringspan")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (ours, theirs)]
    offsets = [0, 3, n - 5, n] if packed else None
    for step in range(2):
        ids = text(seed=step, batch=1 if packed else B, n=n)
        labels, positions, keep = ids.clone(), None, None
        if padded:
            keep = torch.ones_like(ids)
            keep[0, -5:] = 0
            labels[keep == 0] = -100
        if packed:
            positions = torch.cat([torch.arange(b - a) for a, b in zip(offsets, offsets[1:])])[None]
            labels[0, [a for a in offsets[1:-1]]] = -100  # the first token of a document is nobody's next one
        expected = theirs(ids, labels=labels, attention_mask=keep, position_ids=positions, use_cache=False)
        expected.loss.backward()
        mine = ranked.shard(ids, labels=labels, attention_mask=keep, cu_seqlens=offsets)
        result = ours(**mine, use_cache=False)
        result.loss.backward()
        where = f"rank {rank}/{p}, {kind} {sharding} packed={packed} padded={padded} step {step}:"
        index = ranked.sharding().positions(rank)
        rows = mine["attention_mask"].bool() if padded else torch.ones_like(mine["input_ids"], dtype=torch.bool)
        dense.close(f"{where} logits", result.logits[rows], expected.logits[:, index][rows])
        loss = result.loss.detach().clone()
        dist.all_reduce(loss)
        dense.close(f"{where} loss", loss, expected.loss)
        for parameter in ours.parameters():
            dist.all_reduce(parameter.grad)
        for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters()):
            dense.close(f"{where} gradient of {name}", a.grad, b.grad, tolerance=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def checkpointed(rank, p):
    """Layers that backward computes again use the tokens and documents of their forward, whatever was shared out or computed since."""
    n = 8 * p
    ours, theirs = make("llama", "sdpa"), make("llama", "sdpa")
    ranked = front.register(group=dist.group.WORLD)
    ours.set_attn_implementation("ringspan")
    ours.gradient_checkpointing_enable()
    ours.train(), theirs.train()
    offsets = [0, 3, n - 5, n]
    ids = text(batch=1, n=n)
    labels = ids.clone()
    labels[0, offsets[1:-1]] = -100
    positions = torch.cat([torch.arange(b - a) for a, b in zip(offsets, offsets[1:])])[None]
    theirs(ids, labels=labels, position_ids=positions, use_cache=False).loss.backward()
    loss = ours(**ranked.shard(ids, labels=labels, cu_seqlens=offsets), use_cache=False).loss
    with torch.no_grad():
        ours(**ranked.shard(text(n=2 * n)), use_cache=False)
    loss.backward()
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters()):
        dist.all_reduce(a.grad)
        dense.close(f"rank {rank}/{p}, checkpointed: gradient of {name}", a.grad, b.grad, tolerance=1e-5)


def wrong_positions(rank, p):
    """position_ids of the shard by itself, 0, 1, 2, ...: RoPE would be wrong, silently."""
    model = make("llama", "sdpa")
    front.register(group=dist.group.WORLD, sharding="contiguous")
    model.set_attn_implementation("ringspan")
    must_fail("position_ids are not the positions", model, text(n=8), use_cache=False)  # on rank 0 too, where they are right by chance
    keep = torch.ones(B, 8, dtype=torch.long) if rank == 0 else None
    must_fail("ranks disagree on the call: a mask with attention_mask on rank 0, a mask without attention_mask on rank 1", model, text(n=8), attention_mask=keep)
    positions = torch.arange(8)[None] + 8 * rank
    cache = model(text(n=8), position_ids=positions).past_key_values
    must_fail("KV cache is not supported over ranks", model, text(n=1), past_key_values=cache)


def other_layers(rank, p):
    """What a shard alone cannot give is refused, on all ranks."""
    front.register(group=dist.group.WORLD, sharding="contiguous")
    small = dict(SMALL, num_hidden_layers=2)
    lfm = transformers.Lfm2Config(**small, layer_types=["conv", "full_attention"])
    mixtral = transformers.MixtralConfig(**small, num_local_experts=2, output_router_logits=True)
    positions = torch.arange(8)[None] + 8 * rank
    for config, message in ((lfm, "layers of kind conv mix tokens outside of attention"), (mixtral, "the loss of the router is no sum")):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="ringspan")
        must_fail(message, model, text(n=8), position_ids=positions, use_cache=False)


def must_fail(message, model, *arguments, **named):
    try:
        model(*arguments, **named)
    except Exception as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"{message}: must be refused")


def substituted(rank, p):
    """ring-flash-attention's adapter, as its README uses it."""
    model = make("qwen3", "sdpa")
    theirs = copy.deepcopy(model)
    substitute_hf_flash_attn(dist.group.WORLD, heads_k_stride=1)
    model.config._attn_implementation_internal = "flash_attention_2"  # what from_pretrained sets where flash-attn is installed
    lengths = (5, 8 * p - 12, 7)
    ids = text(batch=1, n=8 * p)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    update_ring_flash_attn_params(cu_seqlens, dist.group.WORLD)
    expected = theirs(ids, position_ids=positions, use_cache=False).logits.chunk(p, dim=1)[rank]
    out = model(ids.chunk(p, dim=1)[rank], position_ids=positions.chunk(p, dim=1)[rank])
    dense.close("substituted", out.logits, expected)
    use_ring_attn(False)
    dense.close("switched off", model(ids, position_ids=positions, use_cache=False).logits.chunk(p, dim=1)[rank], expected)


def everything(rank, p):
    for kind, sharding, packed, padded, more in (
        ("llama", "zigzag", False, False, {}),
        ("llama", "contiguous", True, False, {}),
        ("llama", "striped", False, True, {}),
        ("qwen2", "zigzag", False, False, WINDOWED),
        ("qwen3", "zigzag", True, False, {}),
    ):
        train(rank, p, kind, sharding, packed, padded, more)
    checkpointed(rank, p)
    wrong_positions(rank, p)
    other_layers(rank, p)
    substituted(rank, p)


def test_training_on_two_ranks():
    worlds.run_ranks(2, everything)
