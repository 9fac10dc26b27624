"""The part of the C API (include/ringspan/ringspan_c.h) that benchmarks call, by ctypes, on torch tensors."""

import ctypes
import os
from ctypes import CFUNCTYPE, Structure, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p, sizeof

import torch

os.environ["RINGSPAN_TUNE_FILE"] = ""  # the sizes that everybody has

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Problem(Structure):
    _fields_ = [("struct_size", c_uint64), ("batch", c_int64), ("tokens_q", c_int64), ("tokens_k", c_int64), ("heads", c_int32),
                ("kv_heads", c_int32), ("head_dim", c_int32), ("head_dim_v", c_int32), ("dtype", c_int32), ("ranks", c_int32),
                ("replicated_q", c_int32), ("alibi", c_int32), ("sinks", c_int32), ("scale", c_float), ("softcap", c_float),
                ("dropout", c_float), ("seed", c_uint64), ("pattern", c_char_p), ("sharding_q", c_char_p),
                ("sharding_k", c_char_p), ("cu_seqlens_q", c_void_p), ("cu_seqlens_q_count", c_uint64),
                ("cu_seqlens_k", c_void_p), ("cu_seqlens_k_count", c_uint64), ("lengths_q", c_void_p), ("lengths_k", c_void_p)]


class Options(Structure):
    _fields_ = [("struct_size", c_uint64), ("strategy", c_char_p), ("bucket_rows", c_int64), ("memory_budget", c_int64),
                ("computing_ranks", c_int32), ("threads", c_int32), ("forward_only", c_int32), ("round_o", c_int32),
                ("flops_per_second", c_int64), ("bytes_per_second", c_int64), ("message_nanoseconds", c_int64),
                ("attend_kernel", c_char_p), ("attend_backward_kernel", c_char_p)]


class ExecuteOptions(Structure):
    _fields_ = [("struct_size", c_uint64), ("deadline_seconds", c_double), ("trace", c_int32), ("nondeterministic", c_int32),
                ("device", c_char_p), ("stream", c_void_p), ("run_on_threads", c_void_p), ("run_on_threads_context", c_void_p)]


@CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_int32)
def run_on_torchs_threads(_, run, argument, threads):
    """Those of OpenMP, as the Python package does; beside threads of its own, torch's would still look for work."""
    ctypes.CDLL(None).GOMP_parallel(c_void_p(run), c_void_p(argument), threads, 0)


class Tensor(Structure):
    _fields_ = [("data", c_void_p), ("batch_stride", c_int64), ("token_stride", c_int64), ("head_stride", c_int64)]


class ForwardTensors(Structure):
    _fields_ = [("struct_size", c_uint64)] + [(name, Tensor) for name in ("q", "k", "v", "o", "lse")] + [
        ("alibi_slopes", c_void_p), ("alibi_batch_stride", c_int64), ("sinks", c_void_p)]


class BackwardTensors(Structure):
    _fields_ = [("struct_size", c_uint64)] + [
        (name, Tensor) for name in ("q", "k", "v", "o", "lse", "d_out", "dlse", "dq", "dk", "dv")] + [
        ("alibi_slopes", c_void_p), ("alibi_batch_stride", c_int64), ("sinks", c_void_p), ("dsinks", c_void_p)]


def tensor(x):
    """A (batch, tokens, heads, dim) view."""
    return Tensor(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def create_threads(library, ranks):
    """Communicators of ranks that are threads of this process."""
    comms = (c_void_p * ranks)()
    if library.ringspan_comm_create_threads(ranks, comms) != 0:
        raise RuntimeError("the communicators of thread ranks could not be made")
    return [c_void_p(comm) for comm in comms]


class Attention:
    """One rank's attention over (batch, tokens, heads, head_dim) tensors; outputs are allocated once."""

    def __init__(self, library, q, k, v, pattern, threads, backward, kernel=None, backward_kernel=None, documents=None, world=None,
                 sharding=None, own_threads=False):
        """own_threads: not torch's. world: (communicator of this rank, ranks); then q, k and v are this rank's rows, equally many on each."""
        ranks = world[1] if world else 1
        self.lib = ctypes.CDLL(library)
        self.lib.ringspan_last_error.restype = c_char_p
        self.problem = Problem(struct_size=sizeof(Problem), batch=q.shape[0], tokens_q=q.shape[1] * ranks,
                               tokens_k=k.shape[1] * ranks, ranks=ranks, sharding_q=sharding.encode() if sharding else None,
                               sharding_k=sharding.encode() if sharding else None,
                               heads=q.shape[2], kv_heads=k.shape[2], head_dim=q.shape[3], head_dim_v=v.shape[3],
                               dtype=DTYPES[q.dtype], pattern=pattern.encode())
        if documents is not None:  # the ends of packed documents, from 0
            self.documents = torch.tensor(documents, dtype=torch.int32)
            for side in "qk":
                setattr(self.problem, f"cu_seqlens_{side}", self.documents.data_ptr())
                setattr(self.problem, f"cu_seqlens_{side}_count", len(documents))
        options = Options(struct_size=sizeof(Options), threads=threads, forward_only=0 if backward else 1,
                          attend_kernel=kernel.encode() if kernel else None,
                          attend_backward_kernel=backward_kernel.encode() if backward_kernel else None)
        comm = world[0] if world else create_threads(self.lib, 1)[0]
        self.handle = c_void_p()
        try:
            execute = ExecuteOptions(struct_size=sizeof(ExecuteOptions))
            if threads > 1 and not own_threads:
                execute.run_on_threads = ctypes.cast(run_on_torchs_threads, c_void_p)
            self.check(self.lib.ringspan_attention_create(byref(self.problem), byref(options), comm, byref(execute), byref(self.handle)))
        finally:
            self.lib.ringspan_comm_destroy(comm)
        self.q, self.k, self.v = q, k, v
        self.o = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
        self.lse = torch.empty(*q.shape[:3], 1)
        self.dq, self.dk, self.dv = (torch.empty_like(x) for x in (q, k, v))

    def __del__(self):
        if getattr(self, "handle", None):
            self.lib.ringspan_attention_destroy(self.handle)

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.ringspan_last_error().decode())

    def forward(self):
        tensors = ForwardTensors(struct_size=sizeof(ForwardTensors), q=tensor(self.q), k=tensor(self.k), v=tensor(self.v),
                                 o=tensor(self.o), lse=tensor(self.lse))
        self.check(self.lib.ringspan_attention_forward(self.handle, byref(tensors)))

    def backward(self, d_out):
        tensors = BackwardTensors(struct_size=sizeof(BackwardTensors), q=tensor(self.q), k=tensor(self.k), v=tensor(self.v),
                                  o=tensor(self.o), lse=tensor(self.lse), d_out=tensor(d_out), dq=tensor(self.dq),
                                  dk=tensor(self.dk), dv=tensor(self.dv))
        self.check(self.lib.ringspan_attention_backward(self.handle, byref(tensors)))
