"""For type checkers only: the arguments of attention() by name, of which an unknown one is then an error where it is written."""

from typing import TypedDict

import torch
from torch.distributed import DeviceMesh, ProcessGroup

from .._core import Pattern
from .._sharding import Sharding


class Options(TypedDict, total=False):
    """All but return_lse, which decides the type of the result. A test compares them with the signature."""

    pattern: Pattern | str | None
    causal: bool
    window: tuple[int, int] | None
    cu_seqlens: torch.Tensor | list[int] | None
    cu_seqlens_k: torch.Tensor | list[int] | None
    lengths: torch.Tensor | list[int] | None
    lengths_k: torch.Tensor | list[int] | None
    starts_k: torch.Tensor | list[int] | None
    scale: float | None
    softcap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    dropout_p: float
    dropout_seed: int | None
    group: ProcessGroup | DeviceMesh | None
    ranks: int | None
    sharding: Sharding | str
    sharding_k: Sharding | str | None
    replicated_q: bool
    strategy: str
    layout: str
    deterministic: bool
    partials: str
    deadline: float | None
    memory_budget: int
    bucket_rows: int
    kernel: str
    device: str | torch.device | None
    host_tensors: bool
