"""Rejects an include that points upwards, or that a public header must not have.

    check_layers.py [ROOT]

Layers, bottom up: base < comm, kernels, pattern < plan < exec < cuda < api < tools. A file includes its own layer, lower ones and
public headers (include/ringspan). Beside them stand io (over base) and oracle, which knows public headers and two headers of
base only, so that it shares no code with what it checks. Public headers include public headers and the standard library, and name no type of CUDA,
MPI or NCCL. Headers of the layers stay light: no fmt, nlohmann, CLI11, GoogleTest or benchmark. Test code, *_test.cc,
*_bench.cc and *_harness.h, may use headers of tests/ and GoogleTest; what is not test code may not include *_harness.h.
"""

import re
import sys
from pathlib import Path

LEVELS = {"base": 0, "comm": 1, "kernels": 1, "pattern": 1, "io": 1, "plan": 2, "exec": 3, "cuda": 4, "api": 5}
ORACLE_MAY = {"base/check.h", "base/float16.h"}  # the first computes nothing, the second is tested exhaustively by itself
TEST_CODE = ("_test.cc", "_bench.cc", "_harness.h")
OUTSIDE_LIBRARY = {"io", "oracle"}  # no layer of the library may include these
C_HEADERS = {"stdbool.h", "stddef.h", "stdint.h"}
HEAVY = re.compile(r"^(fmt|nlohmann|CLI|gtest|gmock|benchmark|rapidcheck)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
DEVICE_TYPE = re.compile(r"\b(cuda[A-Z]\w*|CU(stream|event|context|device)\w*|MPI_\w+|nccl[A-Z]\w*)\b")
SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh", ".inc"}


def includes(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        match = INCLUDE.match(line)
        if match:
            yield number, match[1] == "<", match[2]


def folder_of(root, path, name):
    """What a quoted include reaches: a layer's name, 'public', 'tools', 'tests', or None when there is no such file."""
    if (root / "include" / name).is_file():
        return "public"
    for base, parts in ((root / "src", 1), (root / "tests", 0), (path.parent, None)):
        if (base / name).is_file():
            if parts == 1:
                return name.split("/")[0]
            if parts == 0:
                return "tests"
            relative = (base / name).resolve().relative_to(root.resolve())
            return relative.parts[1] if relative.parts[0] == "src" else relative.parts[0]
    return None


def check_public(root, path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        code = line.split("//")[0]
        if DEVICE_TYPE.search(code):
            yield number, f"a public header names {DEVICE_TYPE.search(code)[0]}"
    for number, angle, name in includes(path):
        standard = angle and (re.fullmatch(r"[a-z_]+", name) or name in C_HEADERS)
        if not standard and (angle or not (root / "include" / name).is_file()):
            yield number, f"a public header includes {name}, which is neither public nor standard"


def check_layer(root, path, layer):
    is_test = path.name.endswith(TEST_CODE)
    for number, angle, name in includes(path):
        if angle:
            if path.suffix == ".h" and not is_test and HEAVY.match(name):
                yield number, f"a header of a layer includes <{name}>; keep it to .cc files"
            continue
        target = folder_of(root, path, name)
        if name.endswith("_harness.h") and not is_test:
            yield number, f"{name} is for tests only"
        elif target is None:
            yield number, f"there is no {name}"
        elif target in ("public", layer) or (target == "tests" and is_test):
            continue
        elif layer == "oracle":
            if name not in ORACLE_MAY:
                yield number, f"the oracle includes {name}; it may know public headers only"
        elif target not in LEVELS or target in OUTSIDE_LIBRARY or LEVELS[target] >= LEVELS[layer]:
            yield number, f"layer {layer} includes {name}, which is not below it"


def violations(root):
    """All violations, as 'path:line: what'."""
    found = []
    for path in sorted(p for p in root.glob("include/**/*") if p.suffix in SUFFIXES):
        found += [f"{path.relative_to(root)}:{n}: {what}" for n, what in check_public(root, path)]
    for path in sorted(p for p in root.glob("src/**/*") if p.suffix in SUFFIXES):
        layer = path.relative_to(root / "src").parts[0]
        if layer not in LEVELS and layer != "oracle":
            found.append(f"{path.relative_to(root)}:1: layer {layer} is unknown; give it a level in tests/layers/check_layers.py")
            continue
        found += [f"{path.relative_to(root)}:{n}: {what}" for n, what in check_layer(root, path, layer)]
    return found


def main():
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parents[2]
    found = violations(root)
    print("\n".join(found) if found else "layers: every include points downwards")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
