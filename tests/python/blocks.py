"""The Python blocks of the documentation: as one process, or by the ranks that a block's `torchrun --nproc-per-node=N` names."""

import re
from pathlib import Path

import worlds

DOCS = Path(__file__).parents[2] / "docs"


def blocks_of(*pages):
    """(page:number, text) of each block, split into those of one process and those of ranks."""
    alone, ranked = [], []
    for page in pages:
        for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE), 1):
            (ranked if "--nproc-per-node=" in block else alone).append((f"{page.stem}:{number}", block))
    return alone, ranked


def run(name, text):
    exec(compile(text, name, "exec"), {"__name__": "block"})


def run_rank(rank, ranks, name, text):
    run(name, re.sub(r"^dist\.(init|destroy)_process_group\(.*$", "", text, flags=re.MULTILINE))  # worlds does both


def run_ranks(name, text):
    worlds.run_ranks(int(re.search(r"--nproc-per-node=(\d)", text)[1]), run_rank, name, text)
