"""Stands in for the flash-attn package, which is for GPUs: forward and backward by torch's CPU flash kernels, for whoever builds a ring
from them. What those cannot do (windows, softcap, ALiBi, dropout, causal with unequal lengths) is refused."""

from .flash_attn_interface import flash_attn_func

__version__ = "2.7.0"
__all__ = ["flash_attn_func"]
