"""The front for PyTorch: see attention()."""

from .._plan import Plan, plan
from .._threads import num_threads, set_num_threads
from . import _flops  # noqa: F401, tells torch
from ._attention import attention
from ._sessions import forget_plans, kernels
from ._group import set_deadline
from ._sharding import Sharding

__all__ = ["Plan", "Sharding", "attention", "forget_plans", "kernels", "num_threads", "plan", "set_deadline", "set_num_threads"]
