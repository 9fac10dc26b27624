"""Plans: who computes, sends and keeps what, before any data is seen."""

import copyreg
import html
import re

from . import _check, _core
from ._core import PlanOptions, Problem
from ._pattern import pattern_of
from ._sharding import Sharding, both_sides
from ._threads import checked_threads, num_threads
from .errors import InvalidArgument

LIBRARIES = ("cudnn", "flash_attn", "flash_attn_3")  # kernels that are not our own

def _filled(kind, fields):
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _reduced(made):
    fields = {name: getattr(made, name) for name in dir(made) if not name.startswith("_")}
    return _filled, (type(made), {name: value for name, value in fields.items() if not callable(value)})


copyreg.pickle(Problem, _reduced)
copyreg.pickle(PlanOptions, _reduced)


def _tile(tile, name):
    """(queries, keys); None: (0, 0)."""
    sizes = _check.integers((0, 0) if tile is None else tile, name, 0, _check.INT32)
    if len(sizes) != 2:
        raise InvalidArgument(f"{name} ({tile!r}) must be a pair (queries, keys)")
    return tuple(sizes)


def set_tokens(problem, tokens_q, tokens_k, cu_seqlens_q, cu_seqlens_k, lengths_q, lengths_k, starts_k):
    """What of a Problem changes from call to call where caches grow and documents are packed; None: not given."""

    def checked(values, name, expected, most=_check.INT64):
        entries = _check.integers(values, name, 0, most)
        if values is not None and not entries and expected > 0:  # which the core takes for not given
            raise InvalidArgument(f"{name} has 0 entries, expected {expected}")
        return entries

    problem.tokens_q, problem.tokens_k = _check.integer(tokens_q, "tokens", 0), _check.integer(tokens_k, "tokens_k", 0)
    problem.cu_seqlens_q = checked(cu_seqlens_q, "cu_seqlens", 2, _check.INT32)
    problem.cu_seqlens_k = checked(cu_seqlens_k, "cu_seqlens_k", 2, _check.INT32)
    if lengths_q is not None and lengths_k is None:
        if tokens_q != tokens_k:
            raise InvalidArgument(f"lengths are given, but lengths_k are not, and q has {tokens_q} tokens and k {tokens_k}; give both")
        lengths_k = lengths_q = tuple(_check.integers(lengths_q, "lengths", 0))
    problem.lengths_q, problem.lengths_k = checked(lengths_q, "lengths", problem.batch), checked(lengths_k, "lengths_k", problem.batch)
    problem.starts_k = checked(starts_k, "starts_k", problem.batch)


def make_problem(
    *, batch, tokens_q, tokens_k, heads, kv_heads, head_dim, head_dim_v, dtype, pattern, cu_seqlens_q=None, cu_seqlens_k=None,
    lengths_q=None, lengths_k=None, starts_k=None, scale=None, softcap=0.0, alibi=False, sinks=False, dropout=0.0, seed=0, ranks=1,
    sharding="contiguous", sharding_k=None, replicated_q=False,
):  # fmt: skip
    """A Problem; its pattern is a checked value."""
    problem = Problem()
    problem.batch = _check.integer(batch, "batch", 1)
    set_tokens(problem, tokens_q, tokens_k, cu_seqlens_q, cu_seqlens_k, lengths_q, lengths_k, starts_k)
    sizes = dict(heads=heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v, ranks=ranks)
    for name, value in sizes.items():
        setattr(problem, name, _check.integer(value, name, 1, _check.INT32))
    problem.dtype = str(dtype).removeprefix("torch.")
    problem.pattern = pattern
    if scale is not None:
        problem.scale = _check.number(scale, "scale")
        if problem.scale == 0:  # in float32, where 0 is the default
            raise InvalidArgument(f"scale ({scale:g}) must not be 0 in float32; None means 1 / sqrt(head_dim)")
    problem.softcap = _check.number(softcap, "softcap")
    if problem.softcap == 0 and softcap != 0:
        raise InvalidArgument(f"softcap ({softcap:g}) must not be 0 in float32; 0 means none")
    problem.alibi, problem.sinks = _check.flag(alibi, "alibi"), _check.flag(sinks, "sinks")
    problem.dropout, problem.seed = _check.number(dropout, "dropout_p"), _check.seed(seed, "seed")
    problem.sharding_q = sharding
    problem.sharding_k = sharding_k if sharding_k is not None else sharding
    problem.replicated_q = replicated_q
    return problem


def make_options(
    *, strategy="auto", backward=True, memory_budget=0, bucket_rows=0, threads=1, kernel="", tile=None, backward_tile=None,
    device="cpu", host_tensors=False, keep_o_float32=None, partials="float32",
):  # fmt: skip
    """Of a device by the name that attention() knows; its plan needs the kind only. Streamed tensors keep o as it is, on the host."""
    options = PlanOptions()
    options.strategy = _check.text(strategy, "strategy")
    options.backward = _check.flag(backward, "backward")
    options.memory_budget = _check.integer(memory_budget, "memory_budget", 0)
    options.bucket_rows = _check.integer(bucket_rows, "bucket_rows", 0)
    options.threads = checked_threads(threads)
    options.attend_kernel = options.attend_backward_kernel = _check.text(kernel, "kernel")
    options.attend_tile, options.attend_backward_tile = _tile(tile, "tile"), _tile(backward_tile, "backward_tile")
    device = _check.text(str(device) if type(device).__module__ == "torch" else device, "device")  # a torch.device, as attention() takes
    options.device = "cuda" if re.fullmatch(r"cuda(-emulated)?(:\d+)?", device) else device
    options.host_tensors = _check.flag(host_tensors, "host_tensors")
    options.partials = _check.text(partials, "partials")
    options.keep_o_float32 = (not host_tensors and kernel not in LIBRARIES) if keep_o_float32 is None else keep_o_float32
    return options


def _bytes(value):
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return ""


class Plan:
    """The plan of one rank. Prints itself; in a notebook it draws who attends whom, where the problem is small.

    It never changes, so that copies are the plan itself, and plans with the same content are equal. A pickled one is planned anew where
    it is loaded, with what is tuned there."""

    def __init__(self, core, options):
        self._core = core
        self._options = options

    def __copy__(self):
        return self

    def __deepcopy__(self, _):
        return self

    def __eq__(self, other):
        return self._core == other._core if isinstance(other, Plan) else NotImplemented

    def __hash__(self):
        return hash((self.fingerprint, self.rank))

    def __reduce__(self):
        return _planned, (self._core.problem, self._options, self.rank)

    @property
    def strategy(self) -> str:
        """The strategy that was chosen."""
        return self._core.strategy

    @property
    def rank(self) -> int:
        return self._core.rank

    @property
    def bucket_rows(self) -> int:
        """Rows that travel at once, of whole chunks those of the largest; -1: nothing travels in buckets."""
        return self._core.bucket_rows

    @property
    def pairs(self) -> int:
        """(batch, head, query, key) pairs that this rank computes."""
        return self._core.pairs

    @property
    def rejected(self) -> list[tuple[str, str, int]]:
        """(candidate, reason, modelled nanoseconds, or fewer than them where that was enough to lose) of what was not taken."""
        return self._core.rejected

    @property
    def fingerprint(self) -> int:
        """Equal on all ranks."""
        return self._core.fingerprint

    @property
    def arena_bytes(self) -> int:
        """Scratch memory of this rank."""
        return self._core.arena_bytes()

    def memory(self, backward: bool = False) -> dict[str, int]:
        """Bytes of this rank by component: the caller's tensors and the arena; of a device also what lies beside it, or pinned on the host."""
        lines = {}
        for component, size, _ in self._core.memory(backward):
            lines[component] = lines.get(component, 0) + size
        return lines

    def memory_bytes(self, backward: bool = False) -> int:
        """Where the rank computes: what a memory budget counts."""
        return self._core.memory_bytes(backward)

    def pinned_bytes(self, backward: bool = False) -> int:
        """In pinned memory of the host, beside a device; in no budget."""
        return self._core.pinned_bytes(backward)

    def host_bytes(self, backward: bool = False) -> tuple[int, int]:
        """(to the device, to the host): what is copied of tensors on the host."""
        return self._core.host_bytes(backward)

    def traffic(self, backward: bool = False) -> list[tuple[int, int]]:
        """(sent, received) bytes per peer."""
        return self._core.traffic(backward)

    def flops(self, backward: bool = False) -> float:
        return self._core.flops(backward)

    def to_json(self) -> str:
        return self._core.to_json()

    def svg(self) -> str:
        """Who attends whom, coloured by the rank that computes it. Only for small problems."""
        return _core.draw_svg(self._core.problem, self._options)

    def __str__(self):
        return str(self._core)

    def __repr__(self):
        return f"<ringspan.Plan strategy={self.strategy} rank={self.rank}/{self._core.problem.ranks}>"

    def _repr_html_(self):
        problem = self._core.problem
        rows = [
            ("pattern", str(problem.pattern)),
            ("tokens", f"{problem.tokens_q:,}" + (f" x {problem.tokens_k:,}" if problem.tokens_k != problem.tokens_q else "")),
            ("ranks", f"{problem.ranks}, {_sharded(problem)}; this is rank {self.rank}"),
            ("strategy", self.strategy),
            ("pairs of this rank", f"{self.pairs:,}"),
            ("memory, forward", _bytes(self._core.memory_bytes(False))),
            ("received, forward", _bytes(sum(received for _, received in self.traffic()))),
        ]
        table = "".join(f"<tr><th style='text-align:left'>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in rows)
        small = max(problem.tokens_q, problem.tokens_k) <= _core.MAX_DRAWN_TOKENS and min(problem.tokens_q, problem.tokens_k) > 0
        picture = self.svg() if small else f"<pre>{html.escape(str(self))}</pre>"
        return f"<div><table>{table}</table>{picture}</div>"


def _sharded(problem):
    if problem.replicated_q:
        return f"queries on every rank, keys {problem.sharding_k}"
    return problem.sharding_q if problem.sharding_k == problem.sharding_q else f"{problem.sharding_q}, keys {problem.sharding_k}"


def _planned(problem, options, rank):
    return Plan(_core.make_plan(problem, options, rank), options)


def plan(
    tokens: int, *, tokens_k: int | None = None, ranks: int = 1, rank: int = 0, batch: int = 1, heads: int = 1,
    kv_heads: int | None = None, head_dim: int = 64, head_dim_v: int | None = None, dtype: str = "float32",
    pattern: _core.Pattern | str | None = None, causal: bool = False, window: tuple[int, int] | None = None, cu_seqlens=None,
    cu_seqlens_k=None, lengths=None, lengths_k=None, starts_k=None, scale: float | None = None, softcap: float = 0.0, dropout_p: float = 0.0,
    alibi: bool = False, sinks: bool = False, sharding: Sharding | str = "zigzag",
    sharding_k: Sharding | str | None = None, replicated_q: bool = False, strategy: str = "auto", backward: bool = True,
    memory_budget: int = 0, bucket_rows: int = 0, kernel: str = "", partials: str = "float32", threads: int | None = None,
    tile: tuple[int, int] | None = None, backward_tile: tuple[int, int] | None = None, device: str = "cpu", host_tensors: bool = False,
) -> Plan:  # fmt: skip
    """What `rank` of `ranks` would compute, send and keep; needs no data and works for any size.

    The arguments are those of attention(), with shapes in place of tensors: alibi and sinks say whether there are any. What decides
    nothing of a plan is left out, and so is deterministic=False, under which a library's kernel may compute: name it with kernel.
    backward says whether gradients will be needed. memory_budget is in bytes per rank (0: unlimited).
    device="cuda" books the memory of a GPU; none is needed.
    tile and backward_tile are (queries, keys) of the kernels' tiles (None: as `ringspan tune` measured, else the kernels' own).
    """
    tokens, ranks = _check.integer(tokens, "tokens", 0), _check.integer(ranks, "ranks", 1, _check.INT32)
    rank = _check.integer(rank, "rank", 0, _check.INT32)
    replicated_q = _check.flag(replicated_q, "replicated_q")
    queries, keys = both_sides(sharding, sharding_k, replicated_q)
    tokens_k = tokens if tokens_k is None else _check.integer(tokens_k, "tokens_k", 0)
    for dealt, count, name in ((queries, tokens, ""), (keys, tokens_k, " of keys")):
        if dealt.mismatch(count, ranks):
            raise InvalidArgument(f"{dealt.mismatch(count, ranks)}; expected {count}{name} over {ranks}")
    problem = make_problem(
        batch=batch,
        tokens_q=tokens,
        tokens_k=tokens_k,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim if head_dim_v is None else head_dim_v,
        dtype=dtype,
        pattern=pattern_of(pattern, causal, window, cu_seqlens is not None),
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens_k,
        lengths_q=lengths,
        lengths_k=lengths_k,
        starts_k=starts_k,
        scale=scale,
        softcap=softcap,
        alibi=alibi,
        sinks=sinks,
        dropout=dropout_p,
        ranks=ranks,
        sharding=queries.kind,
        sharding_k=keys.kind,
        replicated_q=replicated_q,
    )
    options = make_options(
        strategy=strategy, backward=backward, memory_budget=memory_budget, bucket_rows=bucket_rows, kernel=kernel,
        partials=partials, threads=num_threads() if threads is None else threads, tile=tile, backward_tile=backward_tile, device=device,
        host_tensors=host_tensors,
    )  # fmt: skip
    return _planned(problem, options, rank)
