"""Tables of docs/comparison.md from the JSON of `run`: pure functions, standard library only."""

import re
import statistics

from cases import TIMED, Case, wrong
from peers import FAULTS, PEERS

MARK = "✗"
NONE = "–"


def number(x):
    """Three digits at most: 0.24, 3.1, 12, 2e-07."""
    if x == 0:
        return "0"
    if abs(x) < 1e-3:
        return f"{x:.0e}"
    return f"{x:.3f}" if abs(x) < 0.1 else f"{x:.2f}" if abs(x) < 1 else f"{x:.1f}" if abs(x) < 10 else f"{x:,.0f}"


def table(head, rows):
    lines = [f"| {' | '.join(head)} |", "| " + " | ".join("---" for _ in head) + " |"]
    return "\n".join(lines + [f"| {' | '.join(row)} |" for row in rows])


def spread(seconds):
    """Half of the range, relative to the median."""
    return (max(seconds) - min(seconds)) / 2 / statistics.median(seconds)


class Notes:
    """What a cell quotes, under the table."""

    def __init__(self):
        self.texts = []

    def mark(self, text):
        text = text.replace("/__w/pytorch/pytorch/third_party/", "")  # where PyTorch was built
        text = re.sub(r"\[127[^\]]*\]\S*", "[…]", text)
        text = re.sub(r"[\U0001f3d6\ufe0f]", "", re.sub(r" This is typically caused.*", "", text)).replace("|", "\\|").strip()
        if text not in self.texts:
            self.texts.append(text)
        return f"[{self.texts.index(text) + 1}]"

    def lines(self):
        return "\n".join(f"- [{i}] `{text}`" for i, text in enumerate(self.texts, 1))


KINDS = {"error": "refuses", "crash": "crashes", "hang": "hangs", "not offered": "not offered"}


def failure(reply, notes):
    kind = "wrong shape" if "has shape" in reply["error"] else KINDS[reply["failed"]]  # worker.py's check, not the library's word
    return kind if reply["failed"] in ("not offered",) else f"{kind} {notes.mark(reply['error'])}"


# -- times -----------------------------------------------------------------------------------------------------------------------------


def seconds_cell(case, reply, notes):
    if reply is None:
        return NONE
    if "failed" in reply:
        return failure(reply, notes)
    if not reply["seconds"]:
        return NONE
    middle, least = statistics.median(reply["seconds"]), min(reply["seconds"])
    return f"{number(statistics.median(reply['cpu']))} · {number(middle)} ({number(least)})" + (f" {MARK}" if wrong(case, reply) else "")


def times(results, names):
    """Rows: peers, forward and forward + backward; columns: cases."""
    notes, rows = Notes(), []
    for peer in PEERS.values():
        for passed, label in (("forward", peer.title), ("both", "… and backward")):
            cells = []
            for name in names:
                seen = results["times"].get(peer.name, {}).get(name)
                taken = peer.takes(TIMED[name]) and seen is not None
                cells.append(seconds_cell(TIMED[name], seen[passed], notes) if taken else NONE)
            if any(cell != NONE for cell in cells):
                rows.append([label, *cells])
    ranks = {TIMED[name].ranks for name in names}
    heads = [(f"{TIMED[name].ranks} × " if len(ranks) > 1 else "") + f"{TIMED[name].mask}, {TIMED[name].tokens:,}" + ("" if TIMED[name].dtype == "float32" else f", {TIMED[name].dtype}") for name in names]
    return table(["seconds", *heads], rows) + ("\n\n" + notes.lines() if notes.texts else "")


def columns(results, ranks, dilated):
    """The timed cases."""
    timed = {name for of in results["times"].values() for name in of}
    return [name for name, case in TIMED.items() if name in timed and case.ranks == ranks and case.dilated == dilated]


# -- memory, errors --------------------------------------------------------------------------------------------------------------------


def memory(results):
    names = [name for name, case in TIMED.items() if any(name in results["checks"].get(peer, {}) for peer in PEERS) and case.dtype == "float32"]
    rows = []
    for peer in PEERS.values():
        checked = results["checks"].get(peer.name, {})
        cells = []
        for name in names:
            pair = [checked.get(name, {}).get(passed, {}).get("bytes") for passed in ("forward", "both")]
            cells.append(" / ".join(NONE if b is None else f"{b / 2**20:,.0f}" for b in pair) if any(b is not None for b in pair) else NONE)
        if any(cell != NONE for cell in cells):
            rows.append([peer.title, *cells])
    heads = [f"{TIMED[n].ranks} × {TIMED[n].mask}, {TIMED[n].tokens:,}" for n in names]
    return table(["MiB per rank", *heads], rows)


def error_row(case, checked, notes):
    """`checked`: {"forward", "both"} with errors or failures, and "leak"."""
    forward, both = checked["forward"], checked["both"]
    if "failed" in forward:
        return [failure(forward, notes), "", "", "", ""]
    bad = {name for name, _ in wrong(case, forward)} | ({name for name, _ in wrong(case, both)} if "errors" in both else set())
    errors = {**forward["errors"], **both.get("errors", {})}
    cells = [number(errors[name]) + (f" {MARK}" if name in bad else "") if name in errors else NONE for name in ("o", "dq", "dk", "dv")]
    if "failed" in both:
        cells[1] = failure(both, notes)
    leak = checked.get("leak")
    return [*cells, NONE if leak is None else number(leak) + (f" {MARK}" if leak > 0 else "")]


def errors(results):
    notes, rows = Notes(), []
    for peer in PEERS.values():
        for name, case in TIMED.items():
            seen = results["times"].get(peer.name, {}).get(name)
            checked = results["checks"].get(peer.name, {}).get(name)
            if seen is None and checked is None:
                continue
            checked = {**(seen or checked), "leak": checked["forward"].get("leak") if checked else None}
            ranks = "1 process" if case.ranks == 1 else f"{case.ranks} ranks"
            kind = "" if case.dtype == "float32" else f", {case.dtype}"
            rows.append([peer.title, f"{ranks}, {case.mask}, {case.tokens:,}{kind}", *error_row(case, checked, notes)])
    head = ["", "", "o", "dq", "dk", "dv", "leak"]
    return table(head, rows) + ("\n\n" + notes.lines() if notes.texts else "")


# -- probes ----------------------------------------------------------------------------------------------------------------------------


def verdict(answer, notes):
    """One cell: right, refused with its words, or wrong with the number."""
    case = Case.from_json(answer["case"])
    forward, both = answer["forward"], answer["both"]
    if "failed" in forward:
        return failure(forward, notes)
    parts = []
    bad = wrong(case, forward)
    if bad:
        return f"{MARK} o off {number(bad[0][1])}"
    if "failed" in both:
        return f"right; backward {failure(both, notes)}"
    bad = [(name, error) for name, error in wrong(case, both)]
    parts = ", ".join(f"{name} off {number(error)}" for name, error in bad)
    return f"right; {MARK} {parts}" if bad else "right"


def probes(results):
    """The questions that all peers are asked: rows are peers."""
    notes = Notes()
    common = [name for name in results["probes"]["ringspan"]]
    rows = []
    for peer in PEERS.values():
        answers = results["probes"].get(peer.name)
        if answers and peer.probed_as:
            rows.append([peer.title, *(verdict(answers[name], notes) if name in answers else NONE for name in common)])
    asks = [results["probes"]["ringspan"][name]["asks"] for name in common]
    return table(["", *asks], rows) + "\n\n" + notes.lines()


def special_probes(results):
    """Questions to one peer."""
    notes, rows = Notes(), []
    for peer in PEERS.values():
        for name, what, _ in peer.more_probes:
            answer = results["probes"].get(peer.name, {}).get(name)
            if answer:
                rows.append([peer.title, what, verdict(answer, notes)])
    return table(["", "asked", "answer"], rows) + "\n\n" + notes.lines()


# -- faults, shims, versions -----------------------------------------------------------------------------------------------------------


def faults(results):
    notes, rows = Notes(), []

    def cell(seen):
        if seen is None:
            return NONE
        if "failed" in seen:
            return failure(seen, notes)
        if seen["outcome"] == "hang":
            return f"still waits after {seen['seconds']:.0f} s"
        return f"{'ends' if seen['outcome'] == 'crash' else 'error'} after {number(seen['seconds'])} s {notes.mark(seen['error'])}"

    for name in FAULTS:
        seen = results["faults"].get(name, {})
        rows.append([PEERS[name].title, *(cell(seen.get(what)) for what in ("killed", "stopped", "stopped, timeout"))])
    return table(["the other rank was", "killed", "stopped", "stopped, with a limit of 10 s"], rows) + "\n\n" + notes.lines()


def settings(results):
    rows = []
    for peer in PEERS.values():
        shim = f"[{peer.shim}](../bench/peers/shims/{peer.shim}): {peer.shim_does}" if peer.shim else "none"
        rows.append([peer.title, f"{peer.package} {results['versions'].get(peer.package, '')}".strip(), peer.settings, shim])
    return table(["", "package", "as used", "shim"], rows)


def noise(results):
    """{"seconds" or "cpu": (median, largest relative spread over all cells)}, (fewest, most turns)."""
    timed = [seen[passed] for of in results["times"].values() for seen in of.values() for passed in ("forward", "both") if seen[passed].get("cpu")]
    spreads = {clock: sorted(spread(seen[clock]) for seen in timed) for clock in ("seconds", "cpu")}
    turns = [len(seen["cpu"]) for seen in timed]
    return {clock: (statistics.median(s), s[-1]) for clock, s in spreads.items()}, (min(turns), max(turns))


def measured_on(results):
    m, (spreads, (fewest, most)) = results["machine"], noise(results)
    turns = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return (
        f"Measured {results['date']} at {results['revision']} on {m['cpu']}, {m['cores']} virtual cores, {m['memory_gib']} GiB, float32 "
        f"multiply-adds {m['peaks']['float32_gflops']:.0f} GFLOP/s on one thread in the same minute; Python {m['python']}, PyTorch "
        f"{results['versions']['torch']} ({m['torch_isa']}). {turns} turns per cell. The machine was busy with other work: "
        f"half of the range between the fastest and the slowest turn is {100 * spreads['seconds'][0]:.0f} % of the median for wall-clock times (the "
        f"middle cell; {100 * spreads['seconds'][1]:.0f} % at worst) and {100 * spreads['cpu'][0]:.0f} % ({100 * spreads['cpu'][1]:.0f} %) for processor "
        "times, which is why those come first."
    )


def blocks(results):
    """{name of the block in docs/comparison.md: its text}"""
    return {
        "measured on": measured_on(results),
        "settings": settings(results),
        "times 1": times(results, columns(results, 1, False)),
        "times 2": times(results, columns(results, 2, False)),
        "times 4": times(results, columns(results, 4, False) + columns(results, 4, True)),
        "times dilated": times(results, columns(results, 1, True) + columns(results, 2, True)),
        "memory": memory(results),
        "errors": errors(results),
        "probes": probes(results),
        "special probes": special_probes(results),
        "faults": faults(results),
    }


def fill(page, results):
    """The page with every block between its marks replaced."""
    for name, text in blocks(results).items():
        pattern = re.compile(rf"(<!-- {re.escape(name)}: [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(page):
            raise ValueError(f"docs/comparison.md has no block '{name}'")
        page = pattern.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page, count=1)
    return page
