"""The Python blocks of docs/migration.md run as they stand there, and its anchors exist."""

import re
from pathlib import Path

import pytest

import worlds

TEXT = (Path(__file__).parents[3] / "docs" / "migration.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
ALONE = [block for block in BLOCKS if "torchrun" not in block]
RANKED = [block for block in BLOCKS if "torchrun" in block]


def run(text):
    exec(compile(text, "docs/migration.md", "exec"), {"__name__": "migration"})


def run_rank(rank, ranks, text):
    run(re.sub(r"^dist\.(init|destroy)_process_group\(.*$", "", text, flags=re.MULTILINE))  # worlds does both


def test_blocks_of_one_process():
    assert len(ALONE) >= 5
    for block in ALONE:
        run(block)


@pytest.mark.parametrize("number", range(len(RANKED)))
def test_block_of_ranks(number):
    worlds.run_ranks(int(re.search(r"--nproc-per-node=(\d)", RANKED[number])[1]), run_rank, RANKED[number])


def test_links():
    anchors = {re.sub(r"[^\w -]", "", line[3:].lower()).replace(" ", "-") for line in TEXT.splitlines() if line.startswith("## ")}
    links = set(re.findall(r"\]\(#([^)]*)\)", TEXT))
    assert links and links <= anchors
