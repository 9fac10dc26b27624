"""Where a call computes: how the library names the device of the tensors, their addresses there, and the stream of torch that is used.

Nothing is moved: tensors are used where they are. With host_tensors they are memory of the host, pinned, and stream through a device
that is named; a call then ends when its results are there, for torch's operations on the CPU, and its allocator of pinned memory,
wait for nobody. On CUDA a session works on the stream that was torch's current one when it was
made; a call from another stream is ordered behind that stream, and what follows on that stream behind the call. "cuda-emulated" is
the library's emulation of a CUDA device, for tests: tensors of the CPU are its memory, and a call ends when it has.
"""

import contextlib
import functools
import os
import re

import torch

from .. import _core
from ..errors import InvalidArgument, Unsupported

EMULATED = "cuda-emulated"
# Whether the extension reads tensors without calling Python; those of an older torch it reads by their methods, which takes longer.
READS_BY_TABLE = _core.read_tensors_by(getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))
_guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)

_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # of builds of torch with CUDA; what it compiles calls it, too


def current_handle(device):
    """torch's current stream on a CUDA device, without an object for it, which takes 20 times as long."""
    return torch.cuda.current_stream(device).cuda_stream if _raw_stream is None else _raw_stream(device.index)


def check_beside(q, others):
    """Refuses, by name, what is not where q is: (name, tensor or None)."""
    for name, t in others:
        if t is not None and t.device != q.device:
            raise InvalidArgument(f"{name} is on {t.device}, but q is on {q.device}; all tensors must be on one device")


def check(q, k, v, named, host_tensors=False):
    """Refuses, by name, tensors in different places or where nothing computes; `named` is the argument device=, "" or None: not given."""
    if host_tensors:
        return _check_streamed((("q", q), ("k", k), ("v", v)), named)
    kind = q.device.type
    if kind not in ("cpu", "cuda", "meta"):
        raise Unsupported(f"q is on {q.device}; ringspan computes on CPU and CUDA tensors, so move it with q.cpu()")
    check_beside(q, (("k", k), ("v", v)))
    if kind == "cuda" and not _core.HAS_CUDA:
        raise Unsupported(
            f"q is on {q.device}, but this ringspan was built without CUDA; with nvcc 12.8 or newer on PATH, build it with "
            "`pip install . -C cmake.define.RINGSPAN_CUDA=ON`, or move the tensors with q.cpu()"
        )
    if not named:
        return
    if named == EMULATED:
        if kind == "cuda":
            raise InvalidArgument(f"device is {EMULATED}, whose memory is tensors of the CPU, but q is on {q.device}")
    elif named != "cpu" and not re.fullmatch("cuda(:[0-9]+)?", named):
        raise InvalidArgument(f"unknown device {named!r}: expected cpu, cuda, cuda:INDEX or {EMULATED}")
    elif kind != "meta" and named not in (kind, str(q.device)):
        streams = ", and host_tensors=True computes there on tensors in pinned memory of the host" if kind == "cpu" else ""
        raise InvalidArgument(f"device is {named}, but q is on {q.device}; tensors are not moved: q.to({named!r}) does{streams}")


def _check_streamed(tensors, named):
    if not named or named == "cpu":
        raise InvalidArgument(
            "host_tensors=True needs device=, the device through which q, k, v stream: 'cuda', 'cuda:1', ...; the CPU reads them where they are"
        )
    if named != EMULATED and not re.fullmatch("cuda(:[0-9]+)?", named):
        raise InvalidArgument(f"unknown device {named!r}: with host_tensors expected cuda, cuda:INDEX or {EMULATED}")
    for name, t in tensors:
        if t.device.type not in ("cpu", "meta"):
            raise InvalidArgument(
                f"{name} is on {t.device}, but host_tensors=True is for tensors in pinned memory of the host; leave it out, or keep {name} on "
                "the host"
            )
    if named == EMULATED:
        return
    if not _core.HAS_CUDA:
        raise Unsupported(
            f"device is {named}, but this ringspan was built without CUDA; with nvcc 12.8 or newer on PATH, build it with "
            "`pip install . -C cmake.define.RINGSPAN_CUDA=ON`"
        )
    if torch.compiler.is_compiling():
        return  # the library sees to it
    if not torch.cuda.is_available():
        raise Unsupported(f"device is {named}, but torch finds no CUDA device")
    for name, t in tensors:
        if t.numel() > 0 and not t.is_pinned():
            raise InvalidArgument(
                f"{name} is in pageable memory, which {named} cannot copy from beside its kernels; pin it once: {name} = {name}.pin_memory(), "
                "or make it with pin_memory=True"
            )


def _maker_of_tensors(device, pins):
    """empty(size, strides, dtype): what torch's compiler calls for results, where torch has it; it makes them on the current device."""

    def anywhere(size, strides, dtype):
        return torch.empty_strided(size, strides, dtype=dtype, device=device, pin_memory=pins)

    quick = getattr(_guards, f"_empty_strided_{device.type}", None)
    if pins or quick is None:
        return anywhere
    if device.type == "cpu":
        return quick
    return lambda *of: (quick if torch._C._cuda_getDevice() == device.index else anywhere)(*of)


class Place:
    """A device: `name` as the library has it, `device` as torch has it. With host_tensors its rows and statistics lie on the host."""

    def __init__(self, device, named, host_tensors=False):
        self.host_tensors = host_tensors
        if host_tensors and named != EMULATED:
            device = torch.device(named)
            if device.index is None:
                device = torch.device("cuda", torch.cuda.current_device())
        self.device = device
        self.kind = EMULATED if named == EMULATED else device.type
        self.name = f"cuda:{device.index or 0}" if self.kind == "cuda" else self.kind
        self.pins = host_tensors and self.kind == "cuda"
        self.empty = _maker_of_tensors(torch.device("cpu") if host_tensors else device, self.pins)  # of results: empty(size, strides, dtype)

    def address(self, t):
        data = 0 if t is None else t.data_ptr()
        return _core.on_emulated_device(data) if data and self.kind == EMULATED else data

    def dense_rows(self, t):
        """The tensor itself unless its last dimension is strided, which kernels cannot read."""
        if t.stride(-1) == 1 or t.shape[-1] <= 1:
            return t
        return self._pinned_copy(t) if self.pins else t.contiguous()

    def aligned_rows(self, t):
        """A gradient as a library's kernels load it, 16 bytes at a time; autograd's may be expanded."""
        steps = [stride * t.element_size() for stride, size in zip(t.stride()[:3], t.shape[:3]) if size > 1]
        fits = t.data_ptr() % 16 == 0 and all(step > 0 and step % 16 == 0 for step in steps)
        return t if self.kind == "cpu" or fits else t.clone(memory_format=torch.contiguous_format)

    def pinned(self, t):
        """The tensor, or where it would have to be pinned and is not (autograd's gradients rarely are) a copy that is."""
        return t if t is None or not self.pins or t.is_pinned() else self._pinned_copy(t)

    def _pinned_copy(self, t):
        return torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True).copy_(t)

    def vector(self, t):
        """Slopes or sinks, which lie on the device also where the tensors do not."""
        return t if t is None or not self.host_tensors else t.to(self.device)

    @contextlib.contextmanager
    def holding(self, tensors):
        """The emulated device takes any tensors of the CPU for pinned, for as long as this lasts."""
        storages = []
        if self.host_tensors and self.kind == EMULATED:
            storages = [t.untyped_storage() for t in tensors if t is not None and t.numel() > 0]
        for storage in storages:
            _core.pin_on_emulated_device(storage.data_ptr(), storage.nbytes())
        try:
            yield
        finally:
            for storage in storages:
                _core.unpin_on_emulated_device(storage.data_ptr())

    def stream(self):
        """torch's current stream there; None: it has none."""
        return torch.cuda.current_stream(self.device) if self.kind == "cuda" else None

    def is_capturing(self):
        return self.kind == "cuda" and torch.cuda.is_current_stream_capturing()


_place_of = functools.lru_cache(maxsize=64)(Place)


def place(device, named, host_tensors=False):
    """Streamed tensors may be for the current device, which is another one in another call."""
    return Place(device, named, True) if host_tensors else _place_of(device, named)


def handle_of(stream):
    """What the library is given for a stream. 0 there means one of its own, so that CUDA's default stream has its other name."""
    return 0 if stream is None else stream.cuda_stream or 1


def nccl_library(place):
    """The library that the ranks of a group on this device ask for, "": the system's; None: none. RINGSPAN_NCCL=0 does without.

    The emulated device has streams that NCCL does not know: there only RINGSPAN_EMULATED_NCCL names one, a stand-in."""
    if place.kind == EMULATED:
        return os.environ.get("RINGSPAN_EMULATED_NCCL")
    return "" if place.kind == "cuda" and os.environ.get("RINGSPAN_NCCL") != "0" else None


class Session:
    """A session of the library with what it uses: a stream of torch's and, where it is alone, an arena from torch's allocator."""

    def __init__(self, place, make, arena=None):
        """make(device, stream) -> the library's session"""
        self.place, self.arena = place, arena
        self.stream = place.stream()
        self.core = make(place.name, handle_of(self.stream))

    @classmethod
    def alone(cls, place, plan, deterministic=True, library=False, openmp=False):
        """openmp: the threads are torch's."""
        if place.kind == "cpu":
            return cls(place, lambda device, stream: _core.Session(plan, None, 30.0, device, stream, openmp=openmp))
        if library:  # what its kernels need is known only when they are asked
            return cls(place, lambda device, stream: _core.Session(plan, None, 30.0, device, stream, deterministic=deterministic))
        arena = torch.empty(plan.arena_bytes(), dtype=torch.uint8, device=place.device)
        made = lambda device, stream: _core.Session(plan, None, 30.0, device, stream, place.address(arena), arena.numel())  # noqa: E731
        return cls(place, made, arena)

    @classmethod
    def of_group(cls, place, problem, options, communicator, deadline, deterministic=True, openmp=False):
        """Collective. The library allocates the arena, for a rank that cannot must tell the others."""
        made = lambda device, stream: _core.Session(problem, options, communicator, deadline, device, stream, deterministic, openmp)  # noqa: E731
        return cls(place, made)

    def may_be_captured(self):
        return self.stream.cuda_stream != 0  # the default stream cannot be

    def run(self, execute, tensors=()):
        """What execute(the library's session) returns; `tensors`: what is read and written"""
        place = self.place
        if place.host_tensors:
            with place.holding(tensors):
                results = self._run(execute)
                self.core.wait()  # torch's operations on the CPU wait for nobody
            return results
        results = self._run(execute)
        if place.kind == EMULATED:
            self.core.wait()
        return results

    def _run(self, execute):
        if self.stream is None or current_handle(self.place.device) == self.stream.cuda_stream:
            return execute(self.core)
        current = self.place.stream()
        self.stream.wait_stream(current)
        try:
            return execute(self.core)
        finally:
            current.wait_stream(self.stream)
