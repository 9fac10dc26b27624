"""FlashAttention 2 and 3, where kernel="flash_attn" or "flash_attn_3" names them: from calls of the library to calls of those packages.

The functions that take o, lse and the gradients apart from autograd are internal to the packages, and their arguments change from version
to version. So arguments go by name: those that a version has are given, what it requires besides is None, and a version without one that
is needed here is refused. Nothing here has run with the packages themselves; tests have stand-ins with the arguments of their versions.
"""

import contextlib
import functools
import importlib
import inspect

import torch

from .. import _core

_MODULES = {"flash_attn": "flash_attn.flash_attn_interface", "flash_attn_3": "flash_attn_interface"}
_FORWARD, _BACKWARD = "_flash_attn_forward", "_flash_attn_backward"
# Alternatives are names of the same argument in different versions.
_COMMON = (("q",), ("k",), ("v",), ("softmax_scale",), ("causal", "is_causal"), ("window_size_right", "window_size"))
_NEEDED = {
    _FORWARD: _COMMON,
    _BACKWARD: (*_COMMON, ("dout",), ("out",), ("softmax_lse",), ("dq",), ("dk",), ("dv",), ("deterministic",)),
}


def _parameters(function):
    return inspect.signature(getattr(function, "_init_fn", function)).parameters  # a custom op of torch's holds its function


def _window(shape):
    """(causal, left, right): both packages count from the lower right corner, and take negative numbers for no bound."""
    corner = shape.keys - shape.queries
    left = -1 if shape.low is None else corner - shape.low
    right = -1 if shape.high is None else shape.high - corner
    return (True, -1, -1) if left == -1 and right == 0 else (False, left, right)


def _band_refusal(kernel, shape):
    corner = shape.keys - shape.queries
    if (shape.low is not None and shape.low > corner) or (shape.high is not None and shape.high < corner):
        return f"its windows contain the lower right corner ({corner}), the band of low {shape.low} and high {shape.high} does not"
    causal, left, right = _window(shape)
    reach = shape.queries - 1 if right < 0 else right  # of the first query
    if kernel == "flash_attn" and not causal and max(left, right) >= 0 and reach >= shape.keys and shape.queries > shape.keys + 1:
        return (f"its windows have wrong bounds where the first of {shape.queries} queries reaches {reach} to the right, as far as there are "
                f"keys ({shape.keys})")  # fmt: skip
    return ""


def refusal(kernel, shape, place):
    """Why the package cannot compute a call; "": it can."""
    try:
        module = importlib.import_module(_MODULES[kernel])
    except Exception as error:
        return f"the package {kernel} cannot be imported ({type(error).__name__}: {error})"
    name = _BACKWARD if shape.backward else _FORWARD
    parameters = _parameters(getattr(module, name)) if hasattr(module, name) else {}
    missing = next((names for names in _NEEDED[name] if not any(n in parameters for n in names)), None)
    if missing:
        return f"this version's {_MODULES[kernel]} has no {name} with an argument {' or '.join(missing)}"
    if shape.head_dim_v != shape.head_dim:
        return f"its head_dim_v ({shape.head_dim_v}) must equal head_dim ({shape.head_dim})"
    if shape.head_dim % 8 != 0 or shape.head_dim > 256:
        return f"its head_dim ({shape.head_dim}) must be a multiple of 8, at most 256"
    capability = place.compute_capability
    if kernel == "flash_attn_3" and not place.on_host and capability != 90:
        return f"it is for GPUs of compute capability 9.0, not {capability // 10}.{capability % 10}"
    if kernel == "flash_attn_3" and shape.backward and shape.deterministic and shape.head_dim > 192:
        return f"its backward pass with head_dim ({shape.head_dim}) over 192 is not deterministic"
    return _band_refusal(kernel, shape)


def _call(function, given):
    parameters = _parameters(function)
    required = {name: None for name, p in parameters.items() if p.default is p.empty}
    return function(**required | {name: value for name, value in given.items() if name in parameters})


def _on_stream(place):
    if place.on_host:
        return contextlib.nullcontext()
    device = torch.device("cuda", place.device)
    # 1 is CUDA's other name for its default stream, which torch does not take for one.
    stream = torch.cuda.default_stream(device) if place.stream == 1 else torch.cuda.ExternalStream(place.stream, device)
    return torch.cuda.stream(stream)


def run(kernel, shape, place, views):
    """Enqueues a call that is not refused."""
    module = importlib.import_module(_MODULES[kernel])
    causal, left, right = _window(shape)
    options = {
        "softmax_scale": shape.scale, "causal": causal, "is_causal": causal, "window_size": (left, right), "window_size_left": left,
        "window_size_right": right, "dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip
    with _on_stream(place):
        t = {name: torch.from_dlpack(view) for name, view in views.items() if view is not None}
        inputs = {"q": t["q"], "k": t["k"], "v": t["v"]}
        if shape.backward:
            # lse is read as if it were dense.
            inputs |= {"dout": t["do"], "out": t["o"], "softmax_lse": t["lse"].contiguous(), "dq": t["dq"], "dk": t["dk"], "dv": t["dv"]}
            _call(getattr(module, _BACKWARD), options | inputs | {"deterministic": shape.deterministic})
        else:
            results = _call(getattr(module, _FORWARD), options | inputs)
            t["o"].copy_(results[0])
            t["lse"].copy_(results[5 if len(results) == 8 else 1])  # 8 until 2.7


for _kernel in _MODULES:
    _core.provide_fused(_kernel, functools.partial(refusal, _kernel), functools.partial(run, _kernel))
