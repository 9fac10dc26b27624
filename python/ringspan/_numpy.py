"""Attention on NumPy arrays: one rank, or several simulated in this process."""

import numpy as np

from . import _check, _core
from ._core import PlanOptions
from ._pattern import pattern_of
from ._plan import make_options, make_problem
from ._sharding import Sharding, canonical
from ._threads import num_threads
from .errors import InvalidArgument, Unsupported

_DTYPES = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}  # bfloat16: of ml_dtypes
_LAYOUTS = ("bshd", "bhsd", "thd")


def _bshd(array, name, layout):
    """(batch, tokens, heads, dim), a view."""
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"{name} ({type(array).__name__}) must be a numpy.ndarray; for torch tensors use ringspan.torch.attention")
    if isinstance(array, np.ma.MaskedArray):
        raise Unsupported(f"{name} is a masked array, and its mask would be lost; pass {name}.data, with a pattern that leaves the tokens out")
    if array.dtype.name not in _DTYPES:
        raise Unsupported(f"{name}.dtype ({array.dtype.name}) is not supported; float32, float16 and bfloat16 are")
    if array.ndim != (3 if layout == "thd" else 4):
        raise InvalidArgument(f"{name} has {array.ndim} dimensions; layout '{layout}' needs {len(layout)}")
    if layout == "thd":
        array = array[None]
    elif layout == "bhsd":
        array = array.swapaxes(1, 2)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    step = array.dtype.itemsize
    if (array.shape[3] > 1 and array.strides[3] != step) or any(stride % step for stride in array.strides):
        array = np.ascontiguousarray(array)
    return array


def _pointer(array):
    step = array.dtype.itemsize
    return (array.ctypes.data, *(stride // step for stride in array.strides[:3]))


def _statistics(array):  # (batch, heads, tokens)
    return (array.ctypes.data, array.strides[0] // 4, array.strides[2] // 4, array.strides[1] // 4)


def _floats(values, name):
    if np.iscomplexobj(values):
        raise InvalidArgument(f"{name} is complex; expected real numbers")
    return np.ascontiguousarray(values, dtype=np.float32)


def _vector(values, name, shapes):
    if values is None:
        return None
    values = _floats(values, name)
    if values.shape not in shapes:
        raise InvalidArgument(f"{name} has shape {values.shape}; expected {' or '.join(map(str, shapes))}")
    return values


def _restore(array, layout):
    if layout == "thd":
        return array[0]
    return array.swapaxes(1, 2) if layout == "bhsd" else array


class _Call:
    """The common part of forward and backward."""

    def __init__(self, q, k, v, backward, *, pattern, causal, window, cu_seqlens, cu_seqlens_k, scale, softcap, alibi_slopes, sinks,
                 dropout_p, seed, ranks, sharding, strategy, layout):  # fmt: skip
        if layout not in _LAYOUTS:
            raise InvalidArgument(f"layout ({layout!r}) must be one of {', '.join(_LAYOUTS)}")
        self.layout = layout
        self.q, self.k, self.v = (_bshd(a, name, layout) for a, name in ((q, "q"), (k, "k"), (v, "v")))
        for name, array in (("k", self.k), ("v", self.v)):
            if array.dtype != self.q.dtype:
                raise InvalidArgument(f"{name}.dtype ({array.dtype.name}) must equal q.dtype ({self.q.dtype.name})")
            if array.shape[0] != self.q.shape[0]:
                raise InvalidArgument(f"{name}.batch ({array.shape[0]}) must equal q.batch ({self.q.shape[0]})")
        if self.k.shape[:3] != self.v.shape[:3]:
            raise InvalidArgument(f"v has (batch, tokens, heads) {self.v.shape[:3]}; it must equal k's {self.k.shape[:3]}")
        if self.k.shape[3] != self.q.shape[3]:
            raise InvalidArgument(f"k.head_dim ({self.k.shape[3]}) must equal q.head_dim ({self.q.shape[3]})")
        batch, tokens_q, heads, head_dim = self.q.shape
        if ranks is None and strategy not in ("auto", "local"):
            PlanOptions().strategy = _check.text(strategy, "strategy")  # refuses what is none
            raise InvalidArgument(f"strategy ({strategy!r}) is for several ranks: give ranks=, for so many in threads")
        ranks = 1 if ranks is None else _check.integer(ranks, "ranks", 1, _check.INT32)
        if isinstance(sharding, Sharding):
            if (sharding.tokens, sharding.ranks) != (tokens_q, ranks):
                raise InvalidArgument(f"sharding is of {sharding.tokens} tokens over {sharding.ranks} ranks; expected {tokens_q} over {ranks}")
            sharding = sharding.kind
        sharding = canonical(sharding)
        self.alibi, self.sinks = _vector(alibi_slopes, "alibi_slopes", ((heads,), (batch, heads))), _vector(sinks, "sinks", ((heads,),))
        problem = make_problem(
            batch=batch or 1, tokens_q=tokens_q, tokens_k=self.k.shape[1], heads=heads, kv_heads=self.k.shape[2], head_dim=head_dim,
            head_dim_v=self.v.shape[3], dtype=_DTYPES[self.q.dtype.name],
            pattern=pattern_of(pattern, causal, window, cu_seqlens is not None),
            cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens_k,
            scale=scale, softcap=softcap, alibi=self.alibi is not None, sinks=self.sinks is not None, dropout=dropout_p,
            seed=_check.seed(seed, "seed"),
            ranks=ranks, sharding=sharding if ranks > 1 else "contiguous",
        )  # fmt: skip
        options = make_options(strategy=strategy, backward=backward, threads=max(1, num_threads() // ranks))
        if ranks == 1:
            options.strategy = "auto"
        # Both passes have the arrays at hand: o is read as it is, nothing is kept in an arena between them.
        options.keep_o_float32 = False
        plans = [_core.make_plan(problem, options, rank) for rank in range(ranks)]
        self.plans = plans if batch > 0 else []  # a batch of nothing, which no plan has, gives empty results
        if backward and problem.pattern.states > 1:
            raise Unsupported("attention_backward on NumPy arrays does not know the torchscale dialect; use ringspan.torch.attention")
        self.vectors = dict(
            alibi=self.alibi.ctypes.data if self.alibi is not None else 0,
            alibi_stride=heads if self.alibi is not None and self.alibi.ndim == 2 else 0,
            sinks=self.sinks.ctypes.data if self.sinks is not None else 0,
        )

    def empty(self, like, dim):
        b, n, h, _ = like.shape
        if self.layout == "bhsd":
            return np.empty((b, h, n, dim), dtype=like.dtype).swapaxes(1, 2)
        return np.empty((b, n, h, dim), dtype=like.dtype)


def attention(q, k, v, *, pattern=None, causal=False, window=None, cu_seqlens=None, cu_seqlens_k=None, scale=None, softcap=0.0,
              alibi_slopes=None, sinks=None, dropout_p=0.0, seed=0, ranks=None, sharding="zigzag", strategy="auto", layout="bshd",
              return_lse=False):  # fmt: skip
    """softmax(q k^T) v under a pattern, on NumPy arrays (batch, tokens, heads, head_dim); float32, float16 or bfloat16.

    k and v may have fewer heads than q (GQA). pattern is the text of docs/cli.md or a Pattern; causal, window=(left, right) and
    cu_seqlens (packed documents) are added to it. scale defaults to 1 / sqrt(head_dim); softcap, alibi_slopes (heads) or (batch,
    heads) and sinks (heads) are those of the PyTorch front. dropout_p drops pairs by (seed, batch, head, query, key): another
    seed, which is 0 unless given, for another mask. ranks=N computes as N ranks would, in threads, sharded and by the strategy
    named. layout is "bshd", "bhsd", or "thd" without a batch. Returns o, and with return_lse also lse (batch, heads, tokens), natural logarithm.
    """
    call = _Call(q, k, v, False, pattern=pattern, causal=causal, window=window, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k,
                 scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, seed=seed, ranks=ranks,
                 sharding=sharding, strategy=strategy, layout=layout)  # fmt: skip
    b, n, h, _ = call.q.shape
    o = call.empty(call.q, call.v.shape[3])
    lse = np.empty((b, h, n), dtype=np.float32)
    tensors = (_pointer(call.q), _pointer(call.k), _pointer(call.v), _pointer(o), _statistics(lse))
    if len(call.plans) == 1:
        _core.Session(call.plans[0]).forward(*tensors, **call.vectors)
    elif call.plans:
        _core.simulate_forward(call.plans, *tensors, **call.vectors)
    out = _restore(o, layout)
    if not return_lse:
        return out
    return out, lse[0] if layout == "thd" else lse


def attention_backward(d_out, q, k, v, o, lse, *, dlse=None, pattern=None, causal=False, window=None, cu_seqlens=None,
                       cu_seqlens_k=None, scale=None, softcap=0.0, alibi_slopes=None, sinks=None, dropout_p=0.0, seed=0, ranks=None,
                       sharding="zigzag", strategy="auto", layout="bshd"):  # fmt: skip
    """The gradients (dq, dk, dv), and dsinks where sinks are given, of attention() with the same arguments; o and lse are its
    results. dlse is the gradient of lse, where it is used."""
    call = _Call(q, k, v, True, pattern=pattern, causal=causal, window=window, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k,
                 scale=scale, softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks, dropout_p=dropout_p, seed=seed, ranks=ranks,
                 sharding=sharding, strategy=strategy, layout=layout)  # fmt: skip
    b, n, h, _ = call.q.shape
    shape = (b, n, h, call.v.shape[3])
    d_out, o = _bshd(d_out, "d_out", layout), _bshd(o, "o", layout)
    for name, array in (("d_out", d_out), ("o", o)):
        if array.shape != shape or array.dtype != call.q.dtype:
            raise InvalidArgument(f"{name} is {array.dtype.name} {array.shape} (bshd); expected {call.q.dtype.name} {shape}")
    statistics = []
    for name, array in (("lse", lse), ("dlse", dlse)):
        if array is None:
            statistics.append(None)
            continue
        array = _floats(array, name)
        array = array[None] if layout == "thd" else array
        if array.shape != (b, h, n):
            raise InvalidArgument(f"{name} has shape {array.shape}; expected (batch, heads, tokens) {(b, h, n)}")
        statistics.append(array)
    if statistics[0] is None:
        raise InvalidArgument("lse is needed; attention(..., return_lse=True) returns it")
    dq, dk, dv = call.empty(call.q, call.q.shape[3]), call.empty(call.k, call.k.shape[3]), call.empty(call.v, call.v.shape[3])
    dsinks = np.zeros(h, dtype=np.float32) if call.sinks is not None else None
    none = (0, 0, 0, 0)
    tensors = [_pointer(call.q), _pointer(call.k), _pointer(call.v), _pointer(o), _statistics(statistics[0]), _pointer(d_out),
               none if statistics[1] is None else _statistics(statistics[1]), _pointer(dq), _pointer(dk), _pointer(dv)]  # fmt: skip
    vectors = dict(call.vectors, dsinks=dsinks.ctypes.data if dsinks is not None else 0)
    if len(call.plans) == 1:
        _core.Session(call.plans[0]).backward(tensors, **vectors)
    elif call.plans:
        _core.simulate_backward(call.plans, tensors, **vectors)
    grads = tuple(_restore(a, layout) for a in (dq, dk, dv))
    return grads if dsinks is None else (*grads, dsinks)
