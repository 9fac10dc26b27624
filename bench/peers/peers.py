"""Who is compared: one entry per library and way of using it. No torch here; the code that calls them is in adapters/."""

import dataclasses

from cases import Case, probes_of


@dataclasses.dataclass(frozen=True)
class Peer:
    name: str
    title: str  # in tables
    adapter: str  # module in adapters/
    package: str
    where: tuple  # ("one" | "ranks") x masks, as "one full"
    settings: str  # what was chosen for it
    shim: str = ""  # folder in shims/
    shim_does: str = ""
    path: str = ""  # name of the --peer-path it needs
    dialect: str = "longnet"  # whose meaning of "dilated" its results are compared with (docs/architecture.md)
    probed_as: str = ""  # "one", "ranks" or "dilated": which of cases.probes_of
    fresh: bool = False  # each probe needs processes of its own
    long: bool = False  # asked for 65,536 tokens too
    more_probes: tuple = ()  # (name, what it asks, Case)

    def takes(self, case):
        return f"{'one' if case.ranks == 1 else 'ranks'} {case.mask}" in self.where and (case.tokens <= 8192 or self.long)

    def probes(self):
        """[(name, what it asks, Case)]"""
        common = [(name, what, case) for name, (what, case) in probes_of(self.probed_as).items()] if self.probed_as else []
        return common + list(self.more_probes)


_ONE = ("one full", "one causal")
_RANKS = ("ranks full", "ranks causal")
_DILATED = ("one dilated", "one dilated causal", "ranks dilated", "ranks dilated causal")

PEERS = {
    peer.name: peer
    for peer in (
        Peer("sdpa", "torch SDPA", "torch_sdpa", "torch", _ONE, "its own choice of backend (flash on CPU)", probed_as="one"),
        Peer("flex", "FlexAttention", "torch_flex", "torch", (*_ONE, "one dilated", "one dilated causal"),
             "torch.compile, block mask made before timing; dilated: score_mod adds the log of how often a key counts", probed_as="one"),
        Peer("context-parallel", "torch context_parallel", "torch_context_parallel", "torch", _RANKS,
             "buffers sharded before timing; load balancing on for causal, off for full", probed_as="ranks", fresh=True,
             more_probes=(("full bfloat16", "not causal, bfloat16", Case("full bfloat16", "full", 512, 2, 1, dtype="bfloat16")),)),
        Peer("rap-ring", "ring-attention-pytorch, ring", "rap_ring", "ring-attention-pytorch", _RANKS,
             "buckets of 1,024 rows, striped for causal attention (its load balancing); odd lengths padded as its module does",
             probed_as="ranks",
             more_probes=(
                 ("bucket", "causal, contiguous, buckets of 96 rows where a rank holds 256",
                  Case("bucket", "causal", 512, 2, 1, options={"bucket": 96, "striped": False})),
                 ("GQA, Llama's order", "query heads as Llama and flash-attn have them",
                  Case("GQA llama", "causal", 512, 2, 1, kv_heads=2, options={"head_order": "llama"})),
                 ("unequal shards", "255 and 254 rows, not padded",
                  Case("unequal shards", "full", 509, 2, 1, options={"pad": False})),
                 ("full padding", "the first 64 of 512 tokens are padding, not causal",
                  Case("full padding", "full", 512, 2, 1, options={"padding": 64})),
                 ("early call", "one call before init_process_group, then the ring",
                  Case("early call", "full", 512, 2, 1, options={"early_call": True})),
             )),
        Peer("rap-zigzag", "ring-attention-pytorch, zigzag", "rap_zigzag", "ring-attention-pytorch", _RANKS,
             "its zig_zag_shard and zig_zag_attn; causal by a mask of positions, as in its tests", probed_as="ranks"),
        Peer("yunchang-ring", "yunchang, ring", "yunchang_ring", "yunchang", _RANKS,
             "ring degree = ranks; `basic` for full, `zigzag` for causal", shim="flash_attn_on_cpu", probed_as="ranks",
             shim_does="a package flash_attn whose forward and backward are torch's CPU flash kernels",
             more_probes=(
                 ("no shim", "as installed, with AttnType.TORCH_MATH, full",
                  Case("no shim", "full", 512, 2, 1, options={"attn_type": "TORCH_MATH"})),
             )),
        Peer("yunchang-ulysses", "yunchang, Ulysses", "yunchang_ulysses", "yunchang", _RANKS,
             "UlyssesAttention over all ranks", shim="flash_attn_on_cpu", shim_does="as above", probed_as="ranks"),
        Peer("torchscale", "torchscale dilated", "torchscale_dilated", "torchscale", _DILATED,
             "projections replaced by the identity, so that attention alone is timed; over ranks seq_parallel",
             shim="torchscale_on_cpu", path="torchscale", dialect="torchscale", probed_as="dilated", long=True,
             shim_does="its flash_attn_func (CUDA only) by torch's CPU flash kernels; its all-gather on CPU tensors",
             more_probes=(
                 ("ragged", "1,000 tokens in segments of 256 and 512, not causal",
                  Case("ragged", "dilated", 1000, 1, 2, heads=12, kv_heads=12, branches=((256, 1), (512, 2)))),
                 ("ragged causal", "the same, causal",
                  Case("ragged causal", "dilated causal", 1000, 1, 2, heads=12, kv_heads=12, branches=((256, 1), (512, 2)))),
             )),
        Peer("fkodom", "dilated-attention-pytorch", "fkodom_dilated", "dilated-attention-pytorch",
             ("one dilated", "one dilated causal"), "as is", shim="xformers_on_cpu", dialect="head_groups", probed_as="dilated",
             shim_does="xformers.ops.memory_efficient_attention (CUDA only) by torch SDPA",
             more_probes=(
                 ("one segment", "one full segment, which is plain attention",
                  Case("one segment", "dilated", 512, 1, 2, branches=((512, 1),))),
                 ("uneven groups", "5 heads over 2 branches",
                  Case("uneven groups", "dilated", 512, 1, 2, heads=5, kv_heads=5, branches=((128, 1), (256, 2)))),
             )),
        Peer("ringspan", "Ringspan", "ringspan_attention", "ringspan", (*_ONE, *_RANKS, *_DILATED),
             "strategy auto; zigzag for causal, contiguous otherwise; dilated: the paper's", probed_as="ranks", long=True),
        Peer("ringspan torchscale", "Ringspan, torchscale dialect", "ringspan_attention", "ringspan", _DILATED,
             "strategy auto; contiguous", dialect="torchscale", long=True),
        Peer("ringspan head groups", "Ringspan, head groups", "ringspan_attention", "ringspan",
             ("one dilated", "one dilated causal"), "strategy auto", dialect="head_groups"),
    )
}  # fmt: skip

# Which peers' ranks are killed and stopped, and over what.
FAULTS = {
    "context-parallel": Case("fault", "full", 2048, 2, 1),
    "rap-ring": Case("fault", "full", 2048, 2, 1),
    "rap-zigzag": Case("fault", "full", 2048, 2, 1),
    "yunchang-ring": Case("fault", "full", 2048, 2, 1),
    "yunchang-ulysses": Case("fault", "full", 2048, 2, 1),
    "torchscale": Case("fault", "dilated", 2048, 2, 1, heads=12, kv_heads=12, branches=((512, 1), (2048, 2))),
    "ringspan": Case("fault", "full", 2048, 2, 1),
}
