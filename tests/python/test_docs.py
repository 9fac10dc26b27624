"""The Python blocks of docs/python.md run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


def test_there_are_blocks():
    assert len(BLOCKS) >= 5


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_block(number, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[number])
    command = [sys.executable, script]
    if "torchrun" in BLOCKS[number]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stderr


def test_every_argument_is_on_the_page():
    import inspect

    from ringspan.torch import attention

    text = PAGE.read_text()
    missing = [name for name in inspect.signature(attention).parameters if name not in "qkv unknown deterministic" and f"`{name}" not in text]
    assert not missing
