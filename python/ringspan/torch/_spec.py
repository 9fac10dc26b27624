"""Spec: the options of a call as one string, which torch.library's schemas allow, and back.

It holds nothing of the shapes, so that one compiled graph serves dynamic ones.
"""

import functools
from dataclasses import dataclass
from operator import index

from .._core import Pattern, PlanOptions
from .._pattern import combined
from .._plan import LIBRARIES
from .._sharding import Dealt, canonical

FORMAT = 5  # raise it with every change of an op's schema: torch's cache of compiled graphs knows the calls, this text in them, no schema
_BACKWARD = 14  # the field of the text


@dataclass(frozen=True)
class Spec:
    text: str
    pattern: Pattern
    documents: bool
    scale: float | None
    softcap: float
    dropout: float
    seeded: bool  # dropout_seed is given, on all ranks the same
    ranks: int  # simulated in this process; 0: not
    sharding: Dealt
    sharding_k: Dealt
    replicated_q: bool
    strategy: str
    layout: str
    backward: bool
    deadline: float
    memory_budget: int
    bucket_rows: int
    kernel: str
    device: str  # "": where the tensors are
    host_tensors: bool
    deterministic: bool
    partials: str

    @property
    def rounds_o(self):
        """Whether backward may be a library's, which computes delta from o in the storage dtype; then nothing else is kept."""
        return not self.deterministic or self.kernel in LIBRARIES


def encode(pattern, causal, window, documents, scale, softcap, dropout, seeded, ranks, sharding, sharding_k, replicated_q,
           strategy, layout, deadline, memory_budget, bucket_rows, kernel, device, host_tensors, deterministic,
           partials="float32"):  # fmt: skip
    """Only formatting: this is traced by torch.compile. Whether gradients are needed is known below: with_backward."""
    bounds = "" if window is None else f"{index(window[0])},{index(window[1])}"  # index(): one that changes has no text while it is traced
    scale_text = "" if scale is None else f"{scale!r}"  # repr() of a number that changes cannot be traced
    return (
        f"{FORMAT}|{pattern}|{int(causal)}|{bounds}|{int(documents)}|{scale_text}|{softcap!r}|{dropout!r}|{index(ranks)}|"
        f"{_side(sharding)}|{_side(sharding_k)}|{int(replicated_q)}|{strategy}|{layout}|0|{deadline!r}|{index(memory_budget)}|"
        f"{index(bucket_rows)}|{kernel}|{device}|{int(host_tensors)}|{int(deterministic)}|{partials}|{int(seeded)}"
    )


def _side(dealt):
    return f"{dealt.kind}@{index(dealt.tokens)}@{index(dealt.ranks)}"


def _dealt(text):
    kind, tokens, ranks = text.split("@")
    return Dealt(canonical(kind), int(tokens), int(ranks))


@functools.lru_cache(maxsize=1024)
def with_backward(text):
    """The same call, of which gradients are needed."""
    fields = text.split("|")
    fields[_BACKWARD] = "1"
    return "|".join(fields)


@functools.lru_cache(maxsize=1024)
def decode(text):
    """Raises InvalidArgument where the pattern, the window, the sharding or the strategy make no sense."""
    (_, pattern, causal, bounds, documents, scale, softcap, dropout, ranks, sharding, sharding_k, replicated_q, strategy, layout,
     backward, deadline, memory_budget, bucket_rows, kernel, device, host_tensors, deterministic, partials, seeded) = text.split("|")  # fmt: skip
    window = tuple(int(bound) for bound in bounds.split(",")) if bounds else None
    PlanOptions().strategy = strategy  # refuses what is none
    return Spec(
        text=text,
        pattern=combined(pattern, causal == "1", window, documents == "1"),
        documents=documents == "1",
        scale=float(scale) if scale else None,
        softcap=float(softcap),
        dropout=float(dropout),
        seeded=seeded == "1",
        ranks=int(ranks),
        sharding=_dealt(sharding),
        sharding_k=_dealt(sharding_k),
        replicated_q=replicated_q == "1",
        strategy=strategy,
        layout=layout,
        backward=backward == "1",
        deadline=float(deadline),
        memory_budget=int(memory_budget),
        bucket_rows=int(bucket_rows),
        kernel=kernel,
        device=device,
        host_tensors=host_tensors == "1",
        deterministic=deterministic == "1",
        partials=partials,
    )
