"""A call of an op: what it computes, and what of it must be equal on all ranks."""

import functools
import hashlib
import struct

import torch

from .._plan import make_options, make_problem, set_tokens
from . import _device
from ._spec import decode, with_backward

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def _ints(t):
    return tuple(t.tolist()) if t is not None else None


_LISTS = ("cu_seqlens", "cu_seqlens_k", "lengths", "lengths_k", "starts_k")
_NO_LISTS = (None,) * 5


def text_hash(text):
    """As int64, which ranks compare."""
    return struct.unpack("<q", hashlib.blake2b(text.encode(), digest_size=8).digest())[0]


def hashed(name, value):
    text = value if isinstance(value, str) else repr(value)
    return (name, text_hash(text), text)


def _shown(dealt):
    return dealt.kind if dealt.tokens < 0 else f"{dealt.kind} of {dealt.tokens} tokens over {dealt.ranks} ranks"


def _dense(b, n, h, dim, swapped, dtype):
    """Size, strides and dtype of (batch, tokens, heads, dim), as torch has them; swapped: heads before tokens in memory."""
    n_, h_, dim_ = max(n, 1), max(h, 1), max(dim, 1)
    return (b, n, h, dim), (n_ * h_ * dim_, dim_, n_ * dim_, 1) if swapped else (n_ * h_ * dim_, h_ * dim_, dim_, 1), dtype


def keeps_o(spec, q):
    """Whether backward reads o in float32 (16-bit training) or per branch (the torchscale dialect), which is kept beside the tensors."""
    return not spec.host_tensors and ((q.dtype != torch.float32 and not spec.rounds_o) or spec.pattern.states > 1)


def saved_bytes(spec, q, v):
    """Of all rows of q, also where a rank needs fewer: the ranks of a host share compiled graphs, in which sizes are."""
    if not spec.backward or not keeps_o(spec, q):
        return 0
    return 4 * spec.pattern.states * q.shape[0] * q.shape[1] * q.shape[2] * v.shape[3]


class Key(tuple):
    """Of a dictionary that is asked often: its hash is computed once."""

    def __init__(self, _):
        self._hash = super().__hash__()

    def __hash__(self):
        return self._hash


def _swapped(of):
    """Of _dense(): the same memory with heads before tokens."""
    (b, n, h, dim), (of_b, of_n, of_h, of_dim), dtype = of
    return (b, h, n, dim), (of_b, of_h, of_n, of_dim), dtype


class Call:
    """What a call of an op computes, but for the lengths of other ranks."""

    def __init__(self, q, k, v, alibi, sinks, cu_q, cu_k, len_q, len_k, start_k, text):
        self.spec = decode(text)
        self.shape = (tuple(q.shape), tuple(k.shape), tuple(v.shape), DTYPES[q.dtype])
        self.lists = tuple(_ints(t) for t in (cu_q, cu_k, len_q, len_k, start_k))
        self.heads_first = self.spec.layout == "bhsd"
        self._layout = self.heads_first, q.dtype
        self.empty = q.shape[0] == 0  # a batch of nothing, which no plan has
        self.alibi, self.sinks = alibi is not None, sinks is not None
        self.saved_bytes = saved_bytes(self.spec, q, v)
        # Whether the library's session takes tensors as they are and makes the results: forward_new(), backward_new(), in the caller's layout.
        self.in_one = not (self.empty or self.spec.ranks or self.spec.host_tensors)
        self.place = _device.place(q.device, self.spec.device, self.spec.host_tensors)
        self.key = Key((text, self.place.name, self.shape, self.lists, self.alibi, self.sinks))

    @functools.cached_property
    def results(self):
        """Of forward: o, lse, what is kept for backward or None. Each: size, strides, dtype; dense in the caller's layout."""
        (b, n, h, _), _, (_, _, _, d_v), _ = self.shape
        lse = (b, h, n), (max(h, 1) * max(n, 1), max(n, 1), 1), torch.float32
        return _dense(b, n, h, d_v, *self._layout), lse, ((self.saved_bytes,), (1,), torch.uint8) if self.saved_bytes else None

    @functools.cached_property
    def gradients(self):
        """Of backward: dq, dk, dv, likewise."""
        return tuple(_dense(*shape, *self._layout) for shape in self.shape[:3])

    @functools.cached_property
    def new_results(self):
        """In the caller's layout."""
        o, *others = self.results
        return (_swapped(o) if self.heads_first else o, *others)

    @functools.cached_property
    def new_gradients(self):
        return tuple(map(_swapped, self.gradients)) if self.heads_first else self.gradients

    def problem(self, tokens_q, tokens_k, ranks):
        (b, _, h, d), (_, _, h_k, _), (_, _, _, d_v), dtype = self.shape
        problem = _problem_of(self.spec.text, b, h, h_k, d, d_v, dtype, self.alibi, self.sinks, ranks).__copy__()
        if self.lists == _NO_LISTS:
            problem.tokens_q, problem.tokens_k = tokens_q, tokens_k
        else:
            set_tokens(problem, tokens_q, tokens_k, *self.lists)
        return problem

    def options(self, threads, ranks, device="cpu"):
        return _options_of(self.spec.text, threads, ranks, device)

    def fields(self, backward):
        """What must be equal on all ranks: (name, value, text); the value of a text or a list is its hash, of others the text is None."""
        (b, _, h, d), (_, _, h_k, _), (_, _, _, d_v), dtype = self.shape
        s = self.spec
        return [
            hashed("the pass", "backward" if backward else "forward"),
            hashed("device", self.place.kind),
            hashed("whether NCCL may be used (RINGSPAN_NCCL)", _device.nccl_library(self.place) is not None),
            ("batch", b, None),
            ("heads", h, None),
            ("kv_heads", h_k, None),
            ("head_dim", d, None),
            ("head_dim_v", d_v, None),
            hashed("dtype", dtype),
            hashed("pattern, causal or window", str(s.pattern)),
            *(hashed(name, values and list(values)) for name, values in zip(_LISTS, self.lists)),
            hashed("scale", s.scale),
            hashed("softcap", s.softcap),
            hashed("dropout_p", s.dropout),
            hashed("alibi_slopes", "given" if self.alibi else "none"),
            hashed("sinks", "given" if self.sinks else "none"),
            hashed("sharding of queries", _shown(s.sharding)),
            hashed("sharding of keys", _shown(s.sharding_k)),
            hashed("replicated_q", s.replicated_q),
            hashed("strategy", s.strategy),
            hashed("whether gradients are needed", s.backward),
            ("memory_budget", s.memory_budget, None),
            ("bucket_rows", s.bucket_rows, None),
            hashed("host_tensors", s.host_tensors),
            hashed("deterministic", s.deterministic),
            hashed("kernel", s.kernel),  # a session has one
            hashed("partials", s.partials),
        ]


@functools.lru_cache(maxsize=256)
def _problem_of(text, batch, heads, kv_heads, head_dim, head_dim_v, dtype, alibi, sinks, ranks):
    """Of no tokens."""
    s = decode(text)
    return make_problem(
        batch=batch, tokens_q=0, tokens_k=0, heads=heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype,
        pattern=s.pattern, scale=s.scale, softcap=s.softcap, alibi=alibi, sinks=sinks, dropout=s.dropout,
        ranks=ranks, sharding=s.sharding.kind if ranks > 1 else "contiguous",
        sharding_k=s.sharding_k.kind if ranks > 1 else "contiguous", replicated_q=s.replicated_q and ranks > 1,
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _options_of(text, threads, ranks, device):
    s = decode(text)
    return make_options(
        strategy=s.strategy if ranks > 1 else "auto", backward=s.backward, memory_budget=s.memory_budget,
        bucket_rows=s.bucket_rows, threads=threads, kernel=s.kernel, device=device, host_tensors=s.host_tensors,
        keep_o_float32=not s.host_tensors and not s.rounds_o, partials=s.partials,
    )  # fmt: skip


class Known:
    """What the first of many calls of one rank has found out for those after it: all have equal options, none host_tensors, and tensors q, k, v that
    differ in nothing but their strides and values."""

    def __init__(self, text):
        self.text = text
        self.heads_first = decode(text).layout == "bhsd"
        self._calls = {}

    def call(self, q, k, v, alibi, sinks, lists, backward):
        """q, k, v in the caller's layout. Lists are in tensors, which have to be read."""
        listless = lists[0] is lists[1] is lists[2] is lists[3] is lists[4] is None
        key = (backward, alibi is None, sinks is None)
        call = self._calls.get(key) if listless else None
        if call is None:
            if self.heads_first:
                q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
            call = Call(q, k, v, alibi, sinks, *lists, with_backward(self.text) if backward else self.text)
            if listless:
                self._calls[key] = call
        return call
