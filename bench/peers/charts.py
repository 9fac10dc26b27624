"""docs/pictures/comparison-*.png: bars of time and memory per case, points of errors."""

import statistics

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.patches import Patch  # noqa: E402

from cases import BOUNDS, TIMED, wrong  # noqa: E402
from peers import PEERS  # noqa: E402

OURS, THEIRS, LIGHT, WRONG = "#1b6ca8", "#6b7280", 0.45, "#c2410c"
TIMES = ["1-full-4096", "1-causal-4096", "1-dilated-8192", "2-full-4096", "2-causal-4096", "2-dilated-8192"]


def title(name):
    case = TIMED[name]
    where = "1 process, 2 threads" if case.ranks == 1 else f"{case.ranks} ranks of 1 thread"
    return f"{case.mask}, n = {case.tokens:,}\n{where}"


def panels(results, value, label, path, heading, note):
    """One panel per case; per peer a bar for forward and a lighter one for forward + backward; value(peer, case) -> {pass: (x, wrong)}."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.4), layout="constrained")
    for axis, name in zip(axes.flat, TIMES):
        shown = [(peer, value(peer.name, name)) for peer in PEERS.values()]
        shown = [(peer, bars) for peer, bars in shown if bars]
        longest = sorted(x for _, bars in shown for x, _ in bars.values())
        end = longest[-2] * 1.15 if longest[-1] > 5 * longest[-2] else longest[-1]  # one that would flatten all others is cut off
        for row, (peer, bars) in enumerate(shown):
            colour = OURS if peer.package == "ringspan" else THEIRS
            for offset, passed, alpha in ((-0.2, "forward", 1.0), (0.2, "both", LIGHT)):
                if passed not in bars:
                    continue
                x, bad = bars[passed]
                axis.barh(row + offset, min(x, end), 0.38, color=colour, alpha=alpha, hatch="////" if bad else None, edgecolor=WRONG if bad else colour,
                          linewidth=1.2 if bad else 0)  # fmt: skip
                text = (f" {x:.2f}" if x < 10 else f" {x:.0f}") + (" →" if x > end else "")
                axis.text(min(x, end), row + offset, text, va="center", fontsize=7, color=WRONG if bad else "black")
        axis.set_yticks(range(len(shown)), [peer.title for peer, _ in shown], fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.16)
        axis.set_title(title(name), fontsize=9)
        axis.set_xlabel(label, fontsize=8)
        axis.tick_params(axis="x", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    key = [Patch(color=OURS, label="Ringspan"), Patch(color=THEIRS, label="others"), Patch(color=THEIRS, alpha=LIGHT, label="lighter: forward + backward"),
           Patch(facecolor="white", edgecolor=WRONG, hatch="////", label="hatched: the result is wrong")]  # fmt: skip
    figure.legend(handles=key, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.suptitle(f"{heading}\n{note}", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def seconds_of(results):
    def value(peer, name):
        seen = results["times"].get(peer, {}).get(name, {})
        return {p: (statistics.median(s["cpu"]), bool(wrong(TIMED[name], s))) for p, s in seen.items() if s.get("cpu")}

    return value


def memory_of(results):
    def value(peer, name):
        seen = results["checks"].get(peer, {}).get(name, {})
        return {p: (s["bytes"] / 2**20, bool(wrong(TIMED[name], s))) for p, s in seen.items() if "bytes" in s}

    return value


def errors(results, path):
    """Per peer the largest error of each of o, dq, dk, dv relative to the largest true value, over its float32 cases."""
    names = ("o", "dq", "dk", "dv")
    marks = dict(zip(names, "os^D"))
    bound = BOUNDS["float32"]
    figure, axis = plt.subplots(figsize=(9, 4.6), layout="constrained")
    shown = [peer for peer in PEERS.values() if any("errors" in seen["forward"] for seen in results["times"].get(peer.name, {}).values())]
    for row, peer in enumerate(shown):
        worst = {}
        for name, checked in results["times"][peer.name].items():
            if TIMED[name].dtype != "float32":
                continue
            reply = checked["both"] if "errors" in checked["both"] else checked["forward"]
            for tensor, error in reply.get("errors", {}).items():
                worst[tensor] = max(worst.get(tensor, 0.0), error / reply["largest"][tensor])
        for i, (tensor, error) in enumerate(worst.items()):
            colour = WRONG if error > bound else OURS if peer.package == "ringspan" else THEIRS
            axis.plot(error, row + (i - 1.5) * 0.17, marks[tensor], color=colour, markersize=6)
    axis.axvspan(bound, 1e5, color=WRONG, alpha=0.06)
    axis.set_xscale("log")
    axis.set_xlim(1e-7, 1e5)
    axis.text(1.3 * bound, len(shown) - 0.55, "wrong", color=WRONG, fontsize=8)
    axis.set_yticks(range(len(shown)), [peer.title for peer in shown], fontsize=8)
    axis.set_ylim(len(shown) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_xlabel("largest error against float64, relative to the largest true value", fontsize=8)
    axis.set_title("Errors in float32, the worst of each peer's cases", fontsize=11)
    handles = [Line2D([], [], marker=marks[n], color=THEIRS, linestyle="", label=n) for n in names]
    axis.legend(handles=handles, fontsize=8, frameon=False, loc="lower right", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw(results, folder):
    plt.rcParams["hatch.linewidth"] = 0.6
    plt.rcParams["font.family"] = "DejaVu Sans"
    panels(results, seconds_of(results), "processor seconds, median", folder / "comparison-time.png", "Processor time of one call, all threads and ranks", "8 heads of 64, float32 (dilated: 12 heads); shorter is better")
    panels(results, memory_of(results), "MiB per rank", folder / "comparison-memory.png", "Growth of peak memory per rank",
           "results included, inputs not; shorter is better")  # fmt: skip
    errors(results, folder / "comparison-errors.png")
