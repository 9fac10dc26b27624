"""What is compared: the problems. No torch here, so that `run` and `report` need nothing but Python."""

import dataclasses

LONGNET = ((2048, 1), (4096, 2), (8192, 4))  # (segment, rate)


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: mask "full", "causal", "dilated" or "dilated causal"; batch 1; self-attention over `tokens`."""

    name: str
    mask: str
    tokens: int
    ranks: int = 1
    threads: int = 2  # per rank
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    value_dim: int = 64
    dtype: str = "float32"
    branches: tuple = ()
    options: dict = dataclasses.field(default_factory=dict)  # "window": (left, right), "padding": so many on the left, "bucket", ...
    seed: int = 1

    @property
    def causal(self):
        return self.mask.endswith("causal")

    @property
    def dilated(self):
        return self.mask.startswith("dilated")

    def to_json(self):
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(fields):
        fields = dict(fields, branches=tuple(tuple(b) for b in fields["branches"]))
        return Case(**fields)


# Of the largest true value: far above rounding, far below what a wrong mask or gradient gives.
BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2}


def wrong(case, reply):
    """Which of o, dq, dk, dv are off by more than rounding: [(name, error)]; "largest" are the largest true values."""
    bound = BOUNDS[case.dtype]
    return [(name, error) for name, error in reply["errors"].items() if not error <= bound * reply["largest"][name]]


def _timed():
    for ranks, threads in ((1, 2), (2, 1), (4, 1)):
        for mask in ("full", "causal"):
            for tokens in (4096, 8192) if ranks < 4 else (4096,):
                yield Case(f"{ranks}-{mask}-{tokens}", mask, tokens, ranks, threads)
            if ranks == 2:
                yield Case(f"{ranks}-{mask}-4096-bfloat16", mask, 4096, ranks, threads, dtype="bfloat16")
        for mask in ("dilated", "dilated causal") if ranks < 4 else ("dilated",):
            name = f"{ranks}-{mask.replace(' ', '-')}-8192"
            yield Case(name, mask, 8192, ranks, threads, heads=12, kv_heads=12, branches=LONGNET)


TIMED = {case.name: case for case in _timed()}
for _dtype in ("float32", "bfloat16"):
    _name = "1-dilated-65536" + ("" if _dtype == "float32" else f"-{_dtype}")
    TIMED[_name] = dataclasses.replace(TIMED["1-dilated-8192"], name=_name, tokens=65536, dtype=_dtype)


def _probe(name, **fields):
    mask = fields.pop("mask", "causal")
    return Case(name, mask, fields.pop("tokens", 512), **fields)


def probes_of(kind):
    """What every peer of a kind is asked, "one" (single process), "ranks" (2 ranks) or "dilated": {name: (what it asks, Case)}."""
    ranks, threads = (2, 1) if kind == "ranks" else (1, 2)
    base = {"ranks": ranks, "threads": threads}
    if kind == "dilated":
        base.update(mask="dilated", heads=12, kv_heads=12, branches=((128, 1), (256, 2), (512, 4)))
    asks = {
        "bfloat16": ("bfloat16 tensors", {"dtype": "bfloat16"}),
        "float16": ("float16 tensors", {"dtype": "float16"}),
        "odd length": ("a length that nothing divides: 509", {"tokens": 509}),
        "GQA": ("4 query heads per kv head", {"heads": base.get("heads", 8), "kv_heads": base.get("heads", 8) // 4}),
        "odd heads": ("3 heads", {"heads": 3, "kv_heads": 3}),
        "value_dim": ("v narrower than k: 32 of 64", {"value_dim": 32}),
        "padding": ("the first 64 of 512 tokens are padding", {"options": {"padding": 64}}),
        "window": ("each query sees the 100 keys before it", {"options": {"window": (100, 0)}}),
    }
    if kind == "dilated":
        del asks["window"]
    return {name: (what, _probe(name, **{**base, **fields})) for name, (what, fields) in asks.items()}
