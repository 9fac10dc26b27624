"""Real text as bytes: a file, or the source of Python's standard library. Every tenth piece is held out."""

import pathlib
import platform
import sysconfig

import numpy as np
import torch

PIECE = 1 << 17  # of a file given by the user: 128 KiB, more than one context


class Text:
    def __init__(self, title, name, train, held_out):
        self.title, self.name = title, name
        self.train, self.held_out = (torch.from_numpy(np.frombuffer(part, dtype=np.uint8).copy()) for part in (train, held_out))

    def window(self, step, tokens, seed=0):
        """(1, tokens) bytes from a random place of the training text: the same on every rank."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        begin = torch.randint(len(self.train) - tokens, (), generator=generator).item()
        return self.train[begin : begin + tokens].long()[None]

    def held_out_window(self, tokens):
        """(1, tokens) bytes from the middle of the held-out text."""
        begin = (len(self.held_out) - tokens) // 2
        return self.held_out[begin : begin + tokens].long()[None]


def entropy(window):
    """Of the bytes under their own frequencies, in nats: no model that ignores the context can do better."""
    share = torch.bincount(window.flatten(), minlength=256).double() / window.numel()
    return -torch.special.xlogy(share, share).sum().item()


def _standard_library():
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "encodings", "idlelib", "lib2to3", "__pycache__"}  # encodings: tables
    files = sorted(path for path in root.rglob("*.py") if not skipped.intersection(path.relative_to(root).parts))
    title = f"the standard library of Python {platform.python_version()}"
    return title, f"{title} ({root})", [path.read_bytes() for path in files]


def load(path=None, least=0):
    """The text; `least` bytes must be in each part."""
    if path is None:
        title, name, pieces = _standard_library()
    else:
        try:
            data = pathlib.Path(path).read_bytes()
        except OSError as error:
            raise SystemExit(f"{path} cannot be read: {error.strerror}") from None
        size = min(PIECE, max(1, len(data) // 10))
        title, name = pathlib.Path(path).name, str(path)
        pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
    held_out = b"".join(pieces[9::10])
    train = b"".join(piece for index, piece in enumerate(pieces) if index % 10 != 9)
    if min(len(train), len(held_out)) <= least:
        raise SystemExit(
            f"{name} is too short: {len(train):,} bytes to train on and {len(held_out):,} held out; each must have more than {least:,}"
        )
    return Text(title, name, train, held_out)
