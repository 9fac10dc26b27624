"""The documentation against what it describes: blocks run as they stand there, messages and arguments exist, pictures are those of
their script. scripts/docs checks links and anchors."""

import inspect
import re
import subprocess
import sys

import pytest

import blocks

ROOT = blocks.DOCS.parent
PAGES = [blocks.DOCS / f"{name}.md" for name in ("index", "start", "concepts", "python", "longnet")]
PAGES += sorted((blocks.DOCS / "guides").glob("*.md")) + sorted((blocks.DOCS / "reference").glob("*.md"))
ALONE, RANKED = blocks.blocks_of(*PAGES)


def test_there_are_blocks():
    assert len(ALONE) >= 12 and len(RANKED) >= 4


@pytest.mark.parametrize("name, text", ALONE, ids=[name for name, _ in ALONE])
def test_block(name, text):
    blocks.run(name, text)


@pytest.mark.parametrize("name, text", RANKED, ids=[name for name, _ in RANKED])
def test_block_of_ranks(name, text):
    blocks.run_ranks(name, text)


def test_no_block_is_left_out():
    """A page with Python blocks is among those that are run, here or in test_migration_page."""
    with_blocks = {page for page in blocks.DOCS.rglob("*.md") if "```python\n" in page.read_text() and page.parent.name != "migration"}
    assert with_blocks <= set(PAGES)


def test_every_argument_is_on_the_page():
    from ringspan.torch import attention

    text = (blocks.DOCS / "python.md").read_text()
    missing = [name for name in inspect.signature(attention).parameters if name not in "qkv unknown" and f"`{name}" not in text]
    assert not missing


def _sources():
    """The text of all sources, string literals that follow one another joined."""
    folders = ("src", "python/ringspan", "python/src", "python/CMakeLists.txt", "CMakeLists.txt", "tools/ringspan", "scripts/setup")
    paths = [path for folder in folders for path in ([ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*"))]
    texts = [path.read_text() for path in paths if path.suffix in (".cc", ".h", ".py", ".txt", "") and path.is_file() and "_test." not in path.name]
    return re.sub(r"\"\s*f?\"", "", "\n".join(texts))


def messages():
    return re.findall(r"^### `(.+)`$", (blocks.DOCS / "troubleshooting.md").read_text(), re.MULTILINE)


def in_sources(message, sources):
    """Whether the parts between the … follow one another, not far apart, on one line."""
    first, *rest = [part for part in message.split("…") if part]
    after = re.compile("".join(r"[^\n]{0,120}?" + re.escape(part) for part in rest))
    return any(after.match(sources, found.end()) for found in re.finditer(re.escape(first), sources))


def test_messages_of_troubleshooting_exist():
    sources = _sources()
    assert len(messages()) > 25
    assert not in_sources("no sign of intelligence for … s", sources)
    missing = [message for message in messages() if not in_sources(message, sources)]
    assert not missing


def test_pictures_are_those_of_the_script(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts/docs_pictures.py", tmp_path], check=True)
    drawn = sorted(tmp_path.iterdir())
    assert len(drawn) == 4
    for picture in drawn:
        assert picture.read_text() == (blocks.DOCS / "pictures" / picture.name).read_text(), f"{picture.name}: run scripts/docs_pictures.py"
