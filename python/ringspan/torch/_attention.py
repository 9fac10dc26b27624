"""ringspan.torch.attention."""

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import numpy as np
import torch

from .. import _check, _core
from .._core import Pattern, PlanOptions
from .._pattern import causal_flag, text_of, window_pair
from .._sharding import Dealt, Sharding, both_sides, canonical
from ..errors import InvalidArgument, UnknownArgument, Unsupported
from . import _device, _group, _ops, _transport
from ._call import DTYPES, Known
from ._spec import decode, encode

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ._typing import Options

LAYOUTS = ("bshd", "bhsd", "thd")
_autocasts = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # on any device; a torch that does not tell is asked of this one

# What other libraries call it.
_ELSEWHERE = {
    "attn_mask": "give pattern= (docs/cli.md), lengths= for padding, or cu_seqlens= for packed documents",
    "attention_mask": "give pattern= (docs/cli.md), lengths= for padding, or cu_seqlens= for packed documents",
    "mask": "give pattern= (docs/cli.md), lengths= for padding, or cu_seqlens= for packed documents",
    "is_causal": "it is causal= here; torch aligns top-left where lengths differ: pattern='causal@top_left'",
    "softmax_scale": "it is scale= here",
    "window_size": "it is window=(left, right) here",
    "sliding_window": "it is window=(left, right) here, both inclusive: (sliding_window - 1, 0)",
    "dropout": "it is dropout_p= here",
    "enable_gqa": "leave it out: GQA follows from the shapes",
    "learnable_sink": "it is sinks= here",
    "s_aux": "it is sinks= here",
    "cu_seqlens_q": "it is cu_seqlens= here, and cu_seqlens_k= where keys differ",
    "max_seqlen": "leave it out: it follows from cu_seqlens",
    "max_seqlen_q": "leave it out: it follows from cu_seqlens",
    "max_seqlen_k": "leave it out: it follows from cu_seqlens",
    "return_attn_probs": "probabilities are never formed; return_lse=True returns the log-sum-exp",
    "block_table": "paged keys are not supported",
    "page_table": "paged keys are not supported",
    "cache_seqlens": "it is lengths_k= here: tokens of each batch item's keys that are there",
    "seqlens_k": "it is lengths_k= here: tokens of each batch item's keys that are there",
    "seqused_k": "it is lengths_k= here: tokens of each batch item's keys that are there",
    "k_cache": "give the cache as k and v, with lengths_k= where it is not full; fronts.flash_attn has flash_attn_with_kvcache",
    "kv_cache": "give the cache as k and v, with lengths_k= where it is not full; fronts.flash_attn has flash_attn_with_kvcache",
    "past_key_values": "give the cache as k and v, with lengths_k= where it is not full",
    "cache_position": "causal=True puts the last query at the last key: give k and v up to there, or lengths_k=",
    "cache_leftpad": "it is starts_k= here: the first key of each batch item, from which lengths_k= count",
    "q_offset": "causal=True puts the last query at the last key: give k and v up to there, or lengths_k=",
    "process_group": "it is group= here",
    "key_padding_mask": "give lengths= for padding at the end, starts_k= for keys that are padding at the beginning",
    "attn_bias": "a bias is not added to the scores; alibi_slopes= are linear ones, pattern= and lengths= say who attends whom",
    "score_mod": "scores are changed by softcap= and alibi_slopes= only",
    "block_mask": "give pattern= (docs/cli.md), \"block:...\" for lists of blocks",
    "scaling": "it is scale= here",
    "seed": "it is dropout_seed= here",
    "qv": "a second query for v is not supported",
}


def refuse_unknown(names):
    """Raises UnknownArgument for the first that is no argument of attention(), with what it is called here."""
    known = inspect.signature(attention).parameters.keys() - {"unknown"}
    for name in names:
        if name in known:
            continue
        if name in _ELSEWHERE:
            raise UnknownArgument(f"attention() has no argument '{name}': {_ELSEWHERE[name]}")
        near = difflib.get_close_matches(name, known, n=1)
        raise UnknownArgument(f"attention() has no argument '{name}'" + (f"; did you mean '{near[0]}'?" if near else ""))


def refuse_spread(name, t):
    if hasattr(type(t), "to_local"):  # of the type: a compiler denies that a traced one has it
        raise Unsupported(f"{name} is a DTensor; pass this rank's part, {name}.to_local(), and group= the mesh's dimension")


def _check_kind(name, t):
    refuse_spread(name, t)
    if t.layout is not torch.strided or t.is_nested:
        raise Unsupported(f"{name} {'is nested' if t.is_nested else f'has layout {t.layout}'}; dense tensors are supported, packed documents by cu_seqlens=")


def _check_kinds(q, k, v):
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, torch.Tensor):
            raise InvalidArgument(f"{name} ({type(t).__name__}) must be a torch.Tensor; for NumPy arrays use ringspan.attention")
        _check_kind(name, t)


def _check_tensors(q, k, v, layout):
    if layout not in LAYOUTS:
        raise InvalidArgument(f"layout ({layout!r}) must be one of {', '.join(LAYOUTS)}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if len(t.shape) != len(layout):
            raise InvalidArgument(f"{name} has {len(t.shape)} dimensions; layout '{layout}' needs {len(layout)}")
        if t.dtype not in DTYPES:
            raise Unsupported(f"{name}.dtype ({t.dtype}) is not supported; float32, bfloat16 and float16 are")
        if t.dtype != q.dtype:
            raise InvalidArgument(f"{name}.dtype ({t.dtype}) must equal q.dtype ({q.dtype})")


def _sizes(t, layout):
    """(batch, tokens, heads, head_dim)"""
    return (t.shape[0], t.shape[2], t.shape[1], t.shape[3]) if layout == "bhsd" else (1, *t.shape) if layout == "thd" else tuple(t.shape)


def _check_shapes(q, k, v):  # (batch, tokens, heads, head_dim)
    for name, t in (("k", k), ("v", v)):
        if t[0] != q[0]:
            raise InvalidArgument(f"{name}.batch ({t[0]}) must equal q.batch ({q[0]})")
    if k[3] != q[3]:
        raise InvalidArgument(f"k.head_dim ({k[3]}) must equal q.head_dim ({q[3]})")
    if v[1] != k[1]:
        raise InvalidArgument(f"v.tokens ({v[1]}) must equal k.tokens ({k[1]})")
    if v[2] != k[2]:
        raise InvalidArgument(f"v.heads ({v[2]}) must equal k.heads ({k[2]})")
    if k[2] == 0 or q[2] % k[2] != 0:
        raise InvalidArgument(f"q.heads ({q[2]}) must be a multiple of k.heads ({k[2]}); is the layout right?")


def _float_vector(values, name, shapes):
    if values is None:
        return None
    if not isinstance(values, torch.Tensor):
        raise InvalidArgument(f"{name} ({type(values).__name__}) must be a torch.Tensor")
    if tuple(values.shape) not in shapes:
        raise InvalidArgument(f"{name} has shape {tuple(values.shape)}; expected {' or '.join(map(str, shapes))}")
    if values.is_complex():
        raise InvalidArgument(f"{name} ({values.dtype}) must be real")
    return values.to(torch.float32).contiguous()


def _slopes(values, shapes):
    values = _float_vector(values, "alibi_slopes", shapes)
    _ops.check_slopes(values)
    return values


def _offsets(values, name):
    if values is None:
        return None
    if not isinstance(values, torch.Tensor):
        values = torch.tensor(_check.integers(values, name), dtype=torch.int64, device="cpu")
    if values.dtype not in (torch.int32, torch.int64) or values.dim() != 1:
        raise InvalidArgument(f"{name} ({values.dtype}, {values.dim()} dimensions) must be a list or tensor of integers, one dimension")
    return values


def _seed(dropout_p, dropout_seed):
    """64 bits in a tensor of int64, or None where nothing is dropped."""
    if dropout_seed is not None:
        dropout_seed = _check.seed(dropout_seed, "dropout_seed")
    if dropout_p == 0.0:
        return None
    if dropout_seed is None:
        return torch.randint(0, 2**62, (1,), dtype=torch.int64, device="cpu")
    return torch.tensor([dropout_seed if dropout_seed < 2**63 else dropout_seed - 2**64], dtype=torch.int64, device="cpu")


_WITHOUT_RANKS = "give group= (processes), or ranks= (simulated in this process); without them this process computes alone"


def _of_several(strategy, sharding_k, replicated_q):
    """Without group and ranks nothing is dealt: a message about what says otherwise, which is mostly a forgotten group, where each rank would
    attend to its own shard only."""
    for name, value in (("replicated_q", replicated_q or None), ("sharding_k", sharding_k)):
        if value is not None:
            return f"{name} ({value!r}) is for several ranks: {_WITHOUT_RANKS}"
    if not torch.compiler.is_compiling():
        PlanOptions().strategy = strategy  # refuses what is none
    return "" if strategy in ("auto", "local") else f"strategy ({strategy!r}) is for several ranks: {_WITHOUT_RANKS}"


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[False] = False, **options: "Unpack[Options]"
) -> torch.Tensor: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: Literal[True], **options: "Unpack[Options]"
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, return_lse: bool, **options: "Unpack[Options]"
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    pattern: Pattern | str | None = None,
    causal: bool = False,
    window: tuple[int, int] | None = None,
    cu_seqlens: torch.Tensor | list[int] | None = None,
    cu_seqlens_k: torch.Tensor | list[int] | None = None,
    lengths: torch.Tensor | list[int] | None = None,
    lengths_k: torch.Tensor | list[int] | None = None,
    starts_k: torch.Tensor | list[int] | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    group: "torch.distributed.ProcessGroup | torch.distributed.DeviceMesh | None" = None,
    ranks: int | None = None,
    sharding: Sharding | str = "zigzag",
    sharding_k: Sharding | str | None = None,
    replicated_q: bool = False,
    strategy: str = "auto",
    layout: str = "bshd",
    return_lse: bool = False,
    deterministic: bool = True,
    partials: str = "float32",
    deadline: float | None = None,
    memory_budget: int = 0,
    bucket_rows: int = 0,
    kernel: str = "",
    device: str | torch.device | None = None,
    host_tensors: bool = False,
    **unknown,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention with exact gradients, on one rank or over many.

    q is (batch, tokens, heads, head_dim), k and v may have fewer heads (GQA: query head h reads kv head h // (heads / kv_heads)).
    layout "bhsd" swaps tokens and heads, "thd" has no batch; strided views are read in place. float32, bfloat16, float16.

    Who attends whom:

    - `pattern`: text of docs/cli.md or ringspan.Pattern: `"causal & window:4095,0"`, `"dilated:2048x1,4096x2"`, `"prefix:100"`, ...
    - `causal`: aligned at the lower right corner where q and k differ in length (`"causal@top_left"` in a pattern: upper left)
    - `window`: (left, right), inclusive; -1: no bound on that side
    - `cu_seqlens`: packed documents: (documents + 1) offsets into all tokens, of all ranks; `cu_seqlens_k` where keys differ
    - `lengths`: (batch): tokens of each batch item that are not padding, over all ranks; `lengths_k` where keys differ (needed where k has another number of tokens)
    - `starts_k`: (batch): the first key of each batch item, which has `lengths_k` from there (without them: to the end): padding on the left

    Scores:

    - `scale` (None: 1 / sqrt(head_dim)), `softcap` (0: none; else at least 2^-126), `sinks` (heads) with a gradient
    - `alibi_slopes` (heads) or (batch, heads): adds -slope * |i - j| to the score of query i and key j, which are aligned as `causal`
      aligns them; no gradient
    - `dropout_p`; `dropout_seed` in [0, 2^64), the same on all ranks: else drawn from torch's generator, and that of rank 0 counts

    Ranks:

    - `group`: None: this process alone, always. A process group or one-dimensional DeviceMesh: q, k, v are this rank's shards, and
      every rank of the group makes the same call
    - `ranks`: N: whole tensors, computed as N ranks would, in threads of this process (for tests and studies)
    - `sharding`: a name, or a Sharding; with a name the tokens are the sum of what the ranks hold, dealt as the name says
    - `sharding_k`: how k and v are dealt, where that is not how q is
    - `replicated_q`: every rank has all of q and d_out and gets all of o, lse and dq, in the same bits; k, v, dk and dv are this rank's shards
      of `sharding`. For decoding over a cache that is spread over the ranks
    - `strategy`: `"auto"`, `"ring"`, `"exchange"`, `"all-gather"`, `"ulysses"`, `"pass-q"`, `"local"`
    - `deadline`: seconds without a sign of life of another rank after which all fail; see set_deadline
    - `memory_budget`: bytes per rank (0: unlimited); `bucket_rows`: rows that travel at once (0: as the planner thinks best)
    - `kernel`: a kernel by name, instead of the best one; on CUDA `"own"`, `"mma"`, `"wgmma"`, `"cudnn"`, `"flash_attn"` or
      `"flash_attn_3"`

    Tensors of the CPU are computed on there, CUDA tensors on their device and torch's current stream, where a call returns when its
    work is enqueued. `device` names where that must be, or, with tensors of the CPU, `"cuda-emulated"`: the kernels of CUDA devices
    run on the CPU, slowly, for tests.

    With `host_tensors=True` q, k, v stay in pinned memory of the host (`q.pin_memory()`) and stream through `device`, which must be
    named, in pieces of `bucket_rows` rows; `memory_budget` is then of the device's memory. Results and gradients are pinned tensors of
    the host, and the call returns when they are there. With a group each rank has a device of its own. See docs/python.md.

    Returns o in the layout of q, and with return_lse=True also lse (batch, heads, tokens; "thd": (heads, tokens)), float32,
    natural logarithm, differentiable.

    Results are the same bits in every run. `deterministic=False` is for CUDA tensors of 16 bits on one rank: cuDNN's fused attention may
    compute where one call gives a row's final result. It may give other bits in every run, computes the gradient of q and k from o as
    it was rounded, has no gradient through lse, and takes inputs whose rows begin at multiples of 16 bytes. See docs/cuda.md.

    `partials="storage"` lets a library's kernel (named, or with deterministic=False) also compute where rows take several of its calls:
    on the ranks of a group, and with overlapping dilated branches. Each call rounds its results to the 16-bit dtype before they are
    merged in float32, which makes errors larger, see docs/cuda.md; refused with float32 tensors, on CPUs, and with our own kernels.

    The gradient of sinks on each rank of a group is its share: shares add up to the gradient, as those of weights do.
    """
    name = ""
    if group is not None:
        group = _transport.group_of(group)
        name = _transport.name_of(group)
    try:
        if group is not None and ranks is not None:
            raise InvalidArgument("give group (processes) or ranks (simulated in this process), not both")
        if unknown:
            refuse_unknown(unknown)
        if return_lse is not False:
            return_lse = _check.flag(return_lse, "return_lse")
        if torch.compiler.is_compiling() or _autocasts():
            q, k, v = _cast(q, k, v, host_tensors)
        options = (
            layout, device, host_tensors, "" if pattern is None else text_of(pattern), causal, None if window is None else window_pair(window),
            cu_seqlens is not None, scale, softcap, dropout_p, dropout_seed is not None, group is None, ranks,
            sharding if type(sharding) is str else Dealt.unchanging(sharding), None if sharding_k is None else Dealt.unchanging(sharding_k),
            replicated_q, strategy,
            _group.deadline() if deadline is None else deadline, memory_budget, bucket_rows, kernel, deterministic, partials,
        )  # fmt: skip
        spec = None
        if not (_RECENT is None or torch.compiler.is_compiling()):
            spec = _RECENT.find(q, k, v, options)
        if spec is None:
            spec = _looked_at(q, k, v, sinks, options)
        others = _NO_OTHERS
        if not (alibi_slopes is sinks is cu_seqlens is cu_seqlens_k is lengths is lengths_k is starts_k is dropout_seed is None and dropout_p == 0.0):
            sizes = _sizes(q, layout)
            others = (
                *_vectors(q, sizes, alibi_slopes, sinks, host_tensors),
                *_lists(cu_seqlens, cu_seqlens_k, lengths, lengths_k, starts_k),
                _seed(dropout_p, dropout_seed),
            )
        if layout == "thd":
            q, k, v = q[None], k[None], v[None]
    except Exception as error:
        if name and not torch.compiler.is_compiling():
            _group.refuse(name, error)  # the others raise it too
        raise
    o, lse = _ops.attend(q, k, v, *others, spec, name, layout == "bhsd")
    if layout == "thd":
        o, lse = o[0], lse[0]
    return (o, lse) if return_lse else o


_NO_OTHERS = (None,) * 8  # of the op's tensors besides q, k and v: slopes, sinks, five lists, a seed


def _cast(q, k, v, host_tensors):
    """As autocast has them where it is on."""
    kind = q.device.type if isinstance(q, torch.Tensor) else ""
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    if host_tensors and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor) and {q.dtype, k.dtype, v.dtype} != {dtype}:
        raise InvalidArgument(f"autocast would turn q, k, v into {dtype} in pageable memory; with host_tensors do it yourself, and pin them")
    return [t.to(dtype) if isinstance(t, torch.Tensor) and t.dtype in DTYPES else t for t in (q, k, v)]  # float64 is left alone


def _vectors(q, sizes, alibi_slopes, sinks, host_tensors):
    batch, _, heads, _ = sizes
    if alibi_slopes is not None:
        alibi_slopes = _slopes(alibi_slopes, ((heads,), (batch, heads)))
    if sinks is not None:
        sinks = _float_vector(sinks, "sinks", ((heads,),))
    if not host_tensors:
        _device.check_beside(q, (("alibi_slopes", alibi_slopes), ("sinks", sinks)))
    return alibi_slopes, sinks


def _lists(cu_seqlens, cu_seqlens_k, lengths, lengths_k, starts_k):
    """As tensors. Whether they suit the tokens is known once those of all ranks are (Call.problem)."""
    cu_q, cu_k = _offsets(cu_seqlens, "cu_seqlens"), _offsets(cu_seqlens_k, "cu_seqlens_k")
    if cu_k is not None and cu_q is None:
        raise InvalidArgument("cu_seqlens_k is given without cu_seqlens")
    return cu_q, cu_k, _offsets(lengths, "lengths"), _offsets(lengths_k, "lengths_k"), _offsets(starts_k, "starts_k")


def _looked_at(q, k, v, sinks, options):
    """The spec of a call that is not known: a Known where q, k, v are ordinary, else its text."""
    ordinary = q is not None and k is not None and v is not None and _ops.are_ordinary(q, k, v)
    if not ordinary:
        if not torch.compiler.is_compiling():
            _ops.check_derivatives(q, k, v, sinks)
        _check_kinds(q, k, v)
    text = _text(q, k, v, *options)
    if not ordinary or options[2] is not False:  # host_tensors
        return text
    known = Known(text)
    _RECENT.keep(q, k, v, options, known)
    return known


def _text(q, k, v, *options):
    """The spec of what is not a tensor, checked, also against q, k and v."""
    layout = options[0]
    _check_tensors(q, k, v, layout)
    sizes_q, sizes_k = _sizes(q, layout), _sizes(k, layout)
    _check_shapes(sizes_q, sizes_k, _sizes(v, layout))
    checked = _checked(*options) if torch.compiler.is_compiling() else _checked_once(options)
    _device.check(q, k, v, checked.device, checked.host_tensors)
    for dealt, tokens, name in ((checked.queries, sizes_q[1], "q"), (checked.keys, sizes_k[1], "k")):
        if checked.ranks is not None and dealt.mismatch(tokens, checked.ranks):
            raise InvalidArgument(f"{dealt.mismatch(tokens, checked.ranks)}; expected {tokens} of {name} over {checked.ranks}")
        if checked.alone and dealt.mismatch(tokens, 1):
            raise InvalidArgument(f"{dealt.mismatch(tokens, 1)}, but {name} has {tokens} tokens on one: {_WITHOUT_RANKS}")
    if checked.of_several:
        raise InvalidArgument(checked.of_several)
    return checked.text


class _Checked(NamedTuple):
    """Options: the spec, and what tensors are checked against."""

    text: str
    device: str
    host_tensors: bool
    queries: Dealt
    keys: Dealt
    ranks: int | None
    alone: bool
    of_several: str  # a message: alone, but given what is for several ranks


def _checked(layout, device, host_tensors, pattern, causal, window, documents, scale, softcap, dropout_p, seeded, ungrouped, ranks,
             sharding, sharding_k, replicated_q, strategy, deadline, memory_budget, bucket_rows, kernel, deterministic, partials):  # fmt: skip
    if partials not in ("float32", "storage"):
        raise InvalidArgument(f"partials ({partials!r}) must be 'float32' or 'storage'")
    if device is not None and not isinstance(device, (str, torch.device)):
        raise InvalidArgument(f"device ({device!r}) must be the name of a device")
    device = "" if device is None else str(device)
    host_tensors = _check.flag(host_tensors, "host_tensors")
    dropout_p = _check.number(dropout_p, "dropout_p")
    if not 0.0 <= dropout_p < 1.0:
        raise InvalidArgument(f"dropout_p ({dropout_p}) must be in [0, 1)")
    replicated_q = _check.flag(replicated_q, "replicated_q")
    queries, keys = both_sides(sharding, sharding_k, replicated_q, str if torch.compiler.is_compiling() else canonical)
    strategy = _check.text(strategy, "strategy")
    alone = ungrouped and ranks is None
    if ranks is not None:
        ranks = _check.integer(ranks, "ranks", 1, _check.INT32)
        if host_tensors and ranks > 1:
            raise Unsupported(f"ranks ({ranks}) are simulated on tensors in the memory of the device; with host_tensors there is one rank")
    text = encode(
        pattern, causal_flag(causal), window, documents, None if scale is None else _check.number(scale, "scale"),
        _check.number(softcap, "softcap"), dropout_p, seeded and dropout_p != 0.0, 0 if ranks is None else ranks, queries, keys, replicated_q,
        strategy, layout, _check.positive(deadline, "deadline"), _check.integer(memory_budget, "memory_budget", 0),
        _check.integer(bucket_rows, "bucket_rows", 0), _check.text(kernel, "kernel"), device, host_tensors,
        _check.flag(deterministic, "deterministic"), partials,
    )  # fmt: skip
    if torch.compiler.is_compiling():
        mistake = _mistake(text)
        if mistake:
            raise InvalidArgument(mistake)
    else:
        decode(text)
    return _Checked(text, device, host_tensors, queries, keys, ranks, alone, _of_several(strategy, sharding_k, replicated_q) if alone else "")


@torch.compiler.assume_constant_result  # decode() cannot be traced, and what the fake kernel raises would not break the graph
def _mistake(text):
    """What decode() says against the text; "": nothing."""
    try:
        decode(text)
    except Exception as error:
        return str(error)
    return ""


_latest_checked = functools.lru_cache(maxsize=256, typed=True)(_checked)  # typed: True is not 1


def _checked_once(options):
    """Caches that grow have options that were checked before."""
    try:
        return _latest_checked(*options)
    except TypeError:  # a list, say, which cannot be looked up
        return _checked(*options)


# Others may have changed when they are found again.
_UNCHANGING = type(None), bool, int, float, str, torch.device, Dealt, np.float32, np.float64, np.int32, np.int64
_RECENT = None if _ops.ORDINARY is None else _core.RecentCalls(_ops.ORDINARY, _UNCHANGING, 256)
