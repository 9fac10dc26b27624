"""Reads and writes safetensors files with the standard library only."""

import array
import json
import random
import struct

SIZES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "I64": 8, "F64": 8}


def write(path, tensors, metadata=None):
    """tensors: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    offset = 0
    for name, (dtype, shape, payload) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(payload)]}
        offset += len(payload)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, (_, _, payload) in tensors.items():
            file.write(payload)
    return path


def read(path):
    """name -> (dtype, shape, bytes), and the metadata."""
    with open(path, "rb") as file:
        content = file.read()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    base = 8 + length
    return {
        name: (entry["dtype"], entry["shape"], content[base + entry["data_offsets"][0] : base + entry["data_offsets"][1]])
        for name, entry in header.items()
    }, metadata


def encode(values, dtype="F32"):
    """Floats to bytes; bfloat16 and float16 are rounded to nearest even."""
    if dtype == "F32":
        return array.array("f", values).tobytes()
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    if dtype == "BF16":
        words = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        return struct.pack(f"<{len(values)}H", *(((w + 0x7FFF + ((w >> 16) & 1)) >> 16) & 0xFFFF for w in words))
    if dtype == "I32":
        return array.array("i", values).tobytes()
    raise ValueError(dtype)


def decode(payload, dtype="F32"):
    if dtype == "F32":
        return array.array("f", payload).tolist()
    if dtype == "F16":
        return list(struct.unpack(f"<{len(payload) // 2}e", payload))
    if dtype == "BF16":
        words = struct.unpack(f"<{len(payload) // 2}H", payload)
        return list(struct.unpack(f"<{len(words)}f", struct.pack(f"<{len(words)}I", *(w << 16 for w in words))))
    if dtype == "I32":
        return array.array("i", payload).tolist()
    raise ValueError(dtype)


def normal(shape, seed, dtype="F32", scale=1.0):
    """(dtype, shape, bytes) of seeded normal numbers."""
    draw = random.Random(seed)
    count = 1
    for extent in shape:
        count *= extent
    return dtype, list(shape), encode([draw.gauss(0.0, scale) for _ in range(count)], dtype)


def qkv(tokens=37, heads=4, head_dim=8, *, tokens_k=None, kv_heads=None, head_dim_v=None, batch=1, dtype="F32", seed=1):
    """Tensors q, k, v as `write` takes them."""
    tokens_k = tokens if tokens_k is None else tokens_k
    kv_heads = heads if kv_heads is None else kv_heads
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return {
        "q": normal((batch, tokens, heads, head_dim), seed, dtype),
        "k": normal((batch, tokens_k, kv_heads, head_dim), seed + 1, dtype),
        "v": normal((batch, tokens_k, kv_heads, head_dim_v), seed + 2, dtype),
    }


def tiled(shape, seed, dtype="F32"):
    """As normal(), but a block of 16,384 numbers repeats: quick to make for large tensors."""
    count = 1
    for extent in shape:
        count *= extent
    block = normal((min(count, 16384),), seed, dtype)[2]
    size = count * SIZES[dtype]
    return dtype, list(shape), (block * (size // len(block) + 1))[:size]
