"""The Python blocks of docs/migration/*.md run as they stand there (scripts/docs checks the links)."""

import pytest

import blocks

PAGES = sorted((blocks.DOCS / "migration").glob("*.md"))
ALONE, RANKED = blocks.blocks_of(*PAGES)
NEEDED = {"transformers": "transformers", "torch": "torch.nn.attention.flex_attention"}


def needs(name):
    """The page's own library, where it is not one of the package's requirements."""
    if name.split(":")[0] in NEEDED:
        pytest.importorskip(NEEDED[name.split(":")[0]])


def test_every_page_has_a_block():
    assert {name.split(":")[0] for name, _ in ALONE + RANKED} == {page.stem for page in PAGES}


@pytest.mark.parametrize("name, text", ALONE, ids=[name for name, _ in ALONE])
def test_block(name, text):
    needs(name)
    blocks.run(name, text)


@pytest.mark.parametrize("name, text", RANKED, ids=[name for name, _ in RANKED])
def test_block_of_ranks(name, text):
    needs(name)
    blocks.run_ranks(name, text)
