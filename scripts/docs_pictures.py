#!/usr/bin/env python3
"""Draws docs/pictures/{ring,zigzag,dilation,merging}.svg, the pictures of docs/concepts.md. Standard library only.

    scripts/docs_pictures.py [FOLDER]

Text and lines take the colours of the page they are set into, light or dark; by themselves they follow the system's preference.
"""

import math
import sys
from collections import Counter
from pathlib import Path

RANKS = ("#4269d0", "#c98500", "#2f9e44", "#e8590c")  # mid tones: readable on white and on black
STYLE = (
    "<style>.rs-t{fill:var(--md-typeset-color,#24292f)}.rs-d{fill:var(--md-default-fg-color--light,#57606a)}"
    ".rs-l{stroke:var(--md-default-fg-color--light,#57606a);fill:none}.rs-e{fill:var(--md-default-fg-color--lightest,#d8dee4)}"
    "@media(prefers-color-scheme:dark){.rs-t{fill:var(--md-typeset-color,#e6edf3)}.rs-d{fill:var(--md-default-fg-color--light,#9ea7b3)}"
    ".rs-l{stroke:var(--md-default-fg-color--light,#9ea7b3)}.rs-e{fill:var(--md-default-fg-color--lightest,#30363d)}}</style>"
)


class Picture:
    def __init__(self, width, height, title):
        self.lines = [
            f'<svg class="rs-picture" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" role="img">',
            f"<title>{title}</title>",
            STYLE,
            '<defs><marker id="rs-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"><path class="rs-d" d="M0 0 8 4 0 8z"/></marker></defs>',
        ]

    def rect(self, x, y, w, h, colour=None, round=0, opacity=1):
        paint = f'fill="{colour}"' if colour else 'class="rs-e"'
        extra = (f' rx="{round}"' if round else "") + (f' opacity="{opacity}"' if opacity != 1 else "")
        self.lines.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" {paint}{extra}/>')

    def cells(self, corners, size, colour=None, opacity=1):
        """Squares of one colour, as one path."""
        paint = f'fill="{colour}"' if colour else 'class="rs-e"'
        extra = f' opacity="{opacity}"' if opacity != 1 else ""
        squares = "".join(f"M{x:g} {y:g}h{size}v{size}h-{size}z" for x, y in corners)
        self.lines.append(f'<path d="{squares}" {paint}{extra}/>')

    def text(self, x, y, text, kind="t", anchor="start", bold=False, colour=None, size=None):
        paint = f'fill="{colour}"' if colour else f'class="rs-{kind}"'
        extra = (' font-weight="bold"' if bold else "") + (f' font-size="{size}"' if size else "")
        self.lines.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" {paint}{extra}>{text}</text>')

    def path(self, d, arrow=False):
        self.lines.append(f'<path class="rs-l" d="{d}"' + (' marker-end="url(#rs-head)"' if arrow else "") + "/>")

    def save(self, path):
        path.write_text("\n".join([*self.lines, "</svg>"]) + "\n")


def ring(path):
    p = Picture(760, 330, "Ring: each rank keeps its queries, keys and values travel from rank to rank")
    centre, radius = (150, 175), 100
    at = [(centre[0] + radius * math.sin(a), centre[1] - radius * math.cos(a)) for a in (0, math.pi / 2, math.pi, 3 * math.pi / 2)]
    for r, (x, y) in enumerate(at):
        a, b = math.pi / 2 * r + 0.42, math.pi / 2 * (r + 1) - 0.42
        points = [(centre[0] + radius * math.sin(t), centre[1] - radius * math.cos(t)) for t in (a, b)]
        p.path(f"M{points[0][0]:.1f} {points[0][1]:.1f}A{radius} {radius} 0 0 1 {points[1][0]:.1f} {points[1][1]:.1f}", arrow=True)
        p.rect(x - 34, y - 24, 68, 48, RANKS[r], round=8)
        p.text(x, y - 4, f"rank {r}", anchor="middle", colour="#fff", bold=True)
        p.text(x, y + 13, f"q {r}, k v {r}", anchor="middle", colour="#fff", size=11)
    p.text(centre[0], centre[1] + 5, "k, v", "d", "middle")
    p.text(330, 30, "whose keys and values a rank works on", bold=True)
    for step in range(4):
        p.text(430 + 90 * step, 62, f"step {step}", "d", "middle")
    for r in range(4):
        y = 76 + 52 * r
        p.text(330, y + 27, f"rank {r}", bold=True, colour=RANKS[r])
        for step in range(4):
            owner = (r - step) % 4
            p.rect(392 + 90 * step, y, 76, 42, RANKS[owner], round=5)
            p.text(430 + 90 * step, y + 26, f"k v {owner}", anchor="middle", colour="#fff")
    p.text(330, 304, "While a rank computes with one chunk, the next one arrives.", "d", size=12)
    p.text(330, 321, "p − 1 hops, and no rank ever holds all keys.", "d", size=12)
    p.save(path)


def owners(kind, tokens, ranks):
    if kind == "contiguous":
        return [i * ranks // tokens for i in range(tokens)]
    if kind == "striped":
        return [i % ranks for i in range(tokens)]
    chunk = tokens // (2 * ranks)
    return [min(i // chunk, 2 * ranks - 1 - i // chunk) for i in range(tokens)]


def zigzag(path):
    tokens, ranks, cell = 16, 4, 13
    squares = [(i, j) for i in range(tokens) for j in range(tokens)]
    p = Picture(760, 330, "Causal attention over four ranks: contiguous, zigzag and striped shards and what each rank computes")
    for n, kind in enumerate(("contiguous", "zigzag", "striped")):
        x0, y0 = 20 + 250 * n, 42
        owner = owners(kind, tokens, ranks)
        p.text(x0, 24, kind, bold=True, size=15)
        p.cells([(x0 + cell * j, y0 + cell * i) for i, j in squares if j > i], cell - 1)
        for r in range(ranks):
            p.cells([(x0 + cell * j, y0 + cell * i) for i, j in squares if j <= i and owner[i] == r], cell - 1, RANKS[r])
        for r in range(ranks):
            pairs = sum(i + 1 for i in range(tokens) if owner[i] == r)
            y = y0 + cell * tokens + 18 + 16 * r
            p.rect(x0, y - 10, pairs * 1.9, 11, RANKS[r])
            p.text(x0 + pairs * 1.9 + 6, y, f"{pairs} pairs", "d", size=11)
    p.save(path)


def dilation(path):
    tokens, cell = 16, 9
    branches = ((4, 1), (8, 2), (16, 4))
    squares = [(i, j) for i in range(tokens) for j in range(tokens)]
    p = Picture(760, 420, "Dilated attention: three branches of LongNet for two heads, and their sum under one softmax")
    for head in range(2):
        y0 = 50 + 190 * head
        p.text(10, y0 + 78, f"head {head}", bold=True)
        total = Counter()
        for b, (segment, rate) in enumerate(branches):
            x0 = 70 + 172 * b
            if head == 0:
                p.text(x0, 20, f"{segment} tokens, {'all' if rate == 1 else f'1 in {rate}'}", size=12)
                p.text(x0, 38, f"{segment}x{rate}", "d", size=12)
            seen = [
                (i, j) for i, j in squares
                if j <= i and i // segment == j // segment and i % segment % rate == j % segment % rate == head % rate
            ]  # fmt: skip
            total.update(seen)
            p.cells([(x0 + cell * j, y0 + cell * i) for i, j in squares if (i, j) not in seen], cell - 1)
            p.cells([(x0 + cell * j, y0 + cell * i) for i, j in seen], cell - 1, RANKS[b])
        x0 = 70 + 172 * 3
        if head == 0:
            p.text(x0, 20, "one softmax", size=12)
            p.text(x0, 38, "stronger: counts 2, 3 times", "d", size=12)
        p.cells([(x0 + cell * j, y0 + cell * i) for i, j in squares if (i, j) not in total], cell - 1)
        for times, opacity in ((1, 0.45), (2, 0.72), (3, 1)):
            p.cells([(x0 + cell * j, y0 + cell * i) for i, j in squares if total[i, j] == times], cell - 1, "#7048e8", opacity)
        p.path(f"M{70 - 6} {y0 + 8 * cell - 0.5}H{70 + 172 * 3 + 16 * cell + 6}")
    p.text(70, 412, "The line is where one rank's chunk ends: segments and strides go on across it, for positions are global.", "d", size=12)
    p.save(path)


def merging(path):
    scores = ((0.3, 1.4, -0.2, 0.9), (2.1, 0.4, 1.1, -0.6))
    values = ((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0))
    states = []
    for s, v in zip(scores, values):
        m = max(s)
        weights = [math.exp(x - m) for x in s]
        states.append((m, sum(weights), sum(w * x for w, x in zip(weights, v))))
    m = max(state[0] for state in states)
    l, acc = (sum(math.exp(state[0] - m) * state[k] for state in states) for k in (1, 2))
    weights = [math.exp(x) for x in scores[0] + scores[1]]
    whole = sum(w * x for w, x in zip(weights, values[0] + values[1])) / sum(weights)
    assert abs(whole - acc / l) < 1e-12
    p = Picture(760, 330, "Two ranks' partial softmax states merge into the exact result")
    for n, (state, s, v) in enumerate(zip(states, scores, values)):
        x0 = 20 + 390 * n
        p.text(x0, 24, f"rank {n}: four of the eight keys of one query", bold=True, colour=RANKS[n])
        for k, x in enumerate(s):
            height = 22 * (x + 1)
            p.rect(x0 + 46 * k, 110 - height, 34, height, RANKS[n])
            p.text(x0 + 46 * k + 17, 126, f"{x:+.1f}", "d", "middle", size=11)
        p.text(x0 + 196, 60, "scores", "d", size=11)
        p.text(x0 + 196, 76, f"v = {', '.join(f'{x:g}' for x in v)}", "d", size=11)
        p.text(x0, 156, f"m = {state[0]:.2f}   the largest score")
        p.text(x0, 176, f"l = {state[1]:.4f}   the sum of exp(s − m)")
        p.text(x0, 196, f"acc = {state[2]:.4f}   the sum of exp(s − m) · v")
        p.path(f"M{x0 + 150} 208L{330 + 100 * n} 238", arrow=True)
    p.rect(90, 244, 580, 76, round=8)
    p.text(380, 266, f"m = max(m₀, m₁) = {m:.2f}", anchor="middle")
    p.text(380, 286, f"l = Σ exp(mᵣ − m) lᵣ = {l:.4f}     acc = Σ exp(mᵣ − m) accᵣ = {acc:.4f}", anchor="middle")
    p.text(380, 308, f"o = acc / l = {acc / l:.6f}: what one softmax over all eight keys gives, {whole:.6f}", anchor="middle", bold=True)
    p.save(path)


def main(folder):
    for draw in (ring, zigzag, dilation, merging):
        draw(Path(folder) / f"{draw.__name__}.svg")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "docs" / "pictures")
