"""Spec: the options of a call as one string, which torch.library's schemas allow, and back.

It holds nothing of the shapes, so that one compiled graph serves dynamic ones.
"""

import functools
from dataclasses import dataclass

from .._core import Pattern, PlanOptions
from .._pattern import combined
from .._plan import LIBRARIES
from .._sharding import canonical

FORMAT = 2  # raise it with every change of an op's schema: torch's cache of compiled graphs knows the calls, this text in them, no schema


@dataclass(frozen=True)
class Spec:
    text: str
    pattern: Pattern
    documents: bool
    scale: float | None
    softcap: float
    dropout: float
    ranks: int  # simulated in this process; 0: not
    sharding: str
    sharding_tokens: int  # -1: a name was given; the sum of the local lengths counts
    sharding_ranks: int
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


def encode(pattern, causal, window, documents, scale, softcap, dropout, ranks, sharding, sharding_tokens, sharding_ranks, strategy,
           layout, backward, deadline, memory_budget, bucket_rows, kernel, device, host_tensors, deterministic,
           partials="float32"):  # fmt: skip
    """Only formatting: this is traced by torch.compile."""
    bounds = "" if window is None else f"{window[0]},{window[1]}"
    scale_text = "" if scale is None else f"{scale!r}"  # repr() of a number that changes cannot be traced
    return (
        f"{FORMAT}|{pattern}|{int(causal)}|{bounds}|{int(documents)}|{scale_text}|{softcap!r}|{dropout!r}|{ranks}|"
        f"{sharding}|{sharding_tokens}|{sharding_ranks}|{strategy}|{layout}|{int(backward)}|{deadline!r}|{memory_budget}|"
        f"{bucket_rows}|{kernel}|{device}|{int(host_tensors)}|{int(deterministic)}|{partials}"
    )


@functools.lru_cache(maxsize=1024)
def decode(text):
    """Raises InvalidArgument where the pattern, the window, the sharding or the strategy make no sense."""
    (_, pattern, causal, bounds, documents, scale, softcap, dropout, ranks, sharding, sharding_tokens, sharding_ranks, strategy, layout,
     backward, deadline, memory_budget, bucket_rows, kernel, device, host_tensors, deterministic, partials) = text.split("|")  # fmt: skip
    window = tuple(int(bound) for bound in bounds.split(",")) if bounds else None
    PlanOptions().strategy = strategy  # refuses what is none
    return Spec(
        text=text,
        pattern=combined(pattern, causal == "1", window, documents == "1"),
        documents=documents == "1",
        scale=float(scale) if scale else None,
        softcap=float(softcap),
        dropout=float(dropout),
        ranks=int(ranks),
        sharding=canonical(sharding),
        sharding_tokens=int(sharding_tokens),
        sharding_ranks=int(sharding_ranks),
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
