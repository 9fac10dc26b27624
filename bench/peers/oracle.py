"""Attention in float64, row block by row block, written from the definitions: o, dq, dk, dv of a Case. Dense, but that dilated
queries look for their keys only where all segments end together.

    python oracle.py CASE.json DIALECT OUT.pt

Depends on nothing that is measured. A key that two dilated branches show to a query counts twice.
"""

import json
import math
import sys

import torch

from cases import Case

BLOCK = 1024


def inputs(case):
    """(q, k, v, d_out): (1, tokens, heads, dim), the same everywhere."""
    generator = torch.Generator().manual_seed(case.seed)
    shapes = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, case.value_dim), (case.heads, case.value_dim))
    whole = [torch.randn(1, case.tokens, h, d, generator=generator).to(getattr(torch, case.dtype)) for h, d in shapes]
    whole[3][:, : case.options.get("padding", 0)] = 0  # nobody reads what padding attends to
    return whole


def _branch(i, j, segment, rate, residue):
    return (i // segment == j // segment) & (i % segment % rate == residue) & (j % segment % rate == residue)


def counts(case, dialect, head, i, j):
    """How often query i sees key j: (rows, 1), (1, tokens) positions to (rows, tokens) float64."""
    if not case.dilated:
        n = torch.ones(i.shape[0], j.shape[1], dtype=torch.float64)
    elif dialect == "head_groups":
        sizes = [case.heads // len(case.branches) + (b < case.heads % len(case.branches)) for b in range(len(case.branches))]
        b = next(b for b in range(len(sizes)) if head < sum(sizes[: b + 1]))
        segment, rate = case.branches[b]
        n = _branch(i, j, segment, rate, b % rate).double()
    else:
        n = torch.zeros(i.shape[0], j.shape[1], dtype=torch.float64)
        for segment, rate in case.branches:
            residue = head // math.ceil(case.heads / rate) if dialect == "torchscale" else head % rate
            n += _branch(i, j, segment, rate, residue)
    if case.causal:
        n = n * (j <= i)
    if "padding" in case.options:
        n = n * (j >= case.options["padding"])
    if "window" in case.options:
        left, right = case.options["window"]
        n = n * ((j >= i - left) & (j <= i + right))
    return n


def attention(case, dialect):
    q, k, v, d_out = (t[0].double() for t in inputs(case))
    o, dq, dk, dv = torch.zeros_like(d_out), torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    scale, group = case.head_dim**-0.5, case.heads // case.kv_heads
    share = 1.0 / len(case.branches) if case.dilated and dialect == "head_groups" else 1.0
    span = math.lcm(*(segment for segment, _ in case.branches)) if case.branches else case.tokens
    for h in range(case.heads):
        for first in range(0, case.tokens, BLOCK):
            rows = slice(first, min(first + BLOCK, case.tokens))
            keys = slice(first // span * span, min(-(-rows.stop // span) * span, case.tokens))
            kh, vh = k[keys, h // group], v[keys, h // group]
            j = torch.arange(keys.start, keys.stop)[None, :]
            n = counts(case, dialect, h, torch.arange(rows.start, rows.stop)[:, None], j)
            s = (q[rows, h] @ kh.T) * scale
            top = s.masked_fill(n == 0, -torch.inf).amax(1, keepdim=True).clamp_min(-1e300)
            p = n * torch.exp((s - top).masked_fill_(n == 0, -torch.inf))
            p /= p.sum(1, keepdim=True).clamp_min(1e-300)
            do = d_out[rows, h] * share
            o[rows, h] = p @ vh * share
            dv[keys, h // group] += p.T @ do
            ds = p * (do @ vh.T - (d_out[rows, h] * o[rows, h]).sum(1, keepdim=True)) * scale
            dq[rows, h] = ds @ kh
            dk[keys, h // group] += ds.T @ q[rows, h]
    return {"o": o[None], "dq": dq[None], "dk": dk[None], "dv": dv[None]}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        torch.save(attention(Case.from_json(json.load(file)), sys.argv[2]), sys.argv[3])
