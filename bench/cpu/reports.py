"""What benchmarks are given, and the JSON that they write: read with what must be in it; written whole or not at all, in a place that
is tried first."""

import argparse
import json
import math
import os
import tempfile
from pathlib import Path

OF_COMPARE = ("machine", "peaks", "clock", "cases")  # of every JSON of bench/cpu/compare
OF_PEERS = ("date", "machine", "revision", "versions")  # of every JSON of bench/peers/run
OF_RANKS = ("speed_up", "one_core", "buckets")  # of bench/ranks/run


def read(path, keys, program):
    """The report of `program`, which has `keys`."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SystemExit(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SystemExit(f"{path} is no JSON: {error}") from error
    missing = [key for key in keys if key not in report] if isinstance(report, dict) else keys
    if missing:
        raise SystemExit(f"{path} has no {', '.join(missing)}: JSON of {program} was expected")
    return report


def at_least(least, kind=float):
    """The type of an argument: a finite number."""

    def number(text):
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text}: {what}, at least {least}, was expected")
        return value

    return number


one_or_more = at_least(1, int)


def output(text):
    """The type of an argument: a file that can be written, which is known before what is to be written has been measured."""
    path = Path(text).resolve()
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from error
    return path


def write(path, content):
    """Text, or what becomes JSON."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        beside.write_text(content if isinstance(content, str) else json.dumps(content, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
