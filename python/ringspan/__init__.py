"""Exact attention over sequences that no single device can hold.

``ringspan`` itself needs NumPy only: patterns, shardings, plans, and attention on NumPy arrays. ``ringspan.torch`` is the front
for PyTorch: gradients, torch.compile, ranks that are processes of torch.distributed.
"""

from ._core import Pattern, PlanOptions, Problem, device_report
from ._numpy import attention, attention_backward
from ._plan import Plan, plan
from ._sharding import Sharding
from ._threads import num_threads, set_num_threads
from .errors import CommError, DeviceError, Error, InvalidArgument, OutOfBudget, UnknownArgument, Unsupported

from ._version import __version__

__all__ = [
    "CommError",
    "DeviceError",
    "Error",
    "InvalidArgument",
    "OutOfBudget",
    "Pattern",
    "Plan",
    "PlanOptions",
    "Problem",
    "Sharding",
    "UnknownArgument",
    "Unsupported",
    "__version__",
    "attention",
    "attention_backward",
    "device_report",
    "num_threads",
    "plan",
    "set_num_threads",
]


def __getattr__(name):
    if name == "torch":  # imported when first asked for: torch is not needed otherwise
        import importlib

        return importlib.import_module(".torch", __name__)
    raise AttributeError(f"module 'ringspan' has no attribute '{name}'")
