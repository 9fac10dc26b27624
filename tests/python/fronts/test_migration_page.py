"""The Python blocks of docs/migration/*.md run as they stand there (scripts/docs checks the links)."""

import pytest

import blocks

PAGES = sorted((blocks.DOCS / "migration").glob("*.md"))
ALONE, RANKED = blocks.blocks_of(*PAGES)


def test_every_page_has_a_block():
    assert {name.split(":")[0] for name, _ in ALONE + RANKED} == {page.stem for page in PAGES}


@pytest.mark.parametrize("name, text", ALONE, ids=[name for name, _ in ALONE])
def test_block(name, text):
    blocks.run(name, text)


@pytest.mark.parametrize("name, text", RANKED, ids=[name for name, _ in RANKED])
def test_block_of_ranks(name, text):
    blocks.run_ranks(name, text)
