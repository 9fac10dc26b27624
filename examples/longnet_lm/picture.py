"""The picture: losses on 1 rank and on 2, the long training, memory per rank, who attends whom."""

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

BLUE, ORANGE, GREY = "#2b6cb0", "#dd6b20", "#718096"
DRAWN_TOKENS, DRAWN_HEADS, DRAWN_RANKS = 128, 4, 2


def who_attends_whom(sharding):
    """For each query and key of a small LongNet: 0 nobody, 1 + rank where a key of the query's own rank is read, 3 + rank where the
    key comes from another one. Branches 8x1, 32x4, 128x16: those of the model, 64 times smaller."""
    owner = np.empty(DRAWN_TOKENS, dtype=int)
    for rank in range(DRAWN_RANKS):
        owner[sharding.positions(rank)] = rank
    i, j = np.indices((DRAWN_TOKENS, DRAWN_TOKENS))
    seen = np.zeros_like(i, dtype=bool)
    for segment, rate in ((8, 1), (32, 4), (128, 16)):
        for head in range(DRAWN_HEADS):
            residue = head % rate
            seen |= (i // segment == j // segment) & (i % segment % rate == residue) & (j % segment % rate == residue)
    seen &= j <= i
    return np.where(seen, 1 + owner[i] + DRAWN_RANKS * (owner[i] != owner[j]), 0)


def draw(path, parity, length, memory, facts, sharding):
    figure, ((a, b), (c, d)) = plt.subplots(2, 2, figsize=(13, 10), constrained_layout=True)
    figure.suptitle(f"LongNet on {facts['text']}: {facts['parameters']:,} weights, context {facts['context']:,}")

    one, two = np.array(parity[1]), np.array(parity[2])
    steps = np.arange(1, len(one) + 1)
    a.plot(steps, one, color=BLUE, lw=5, alpha=0.35, label="1 rank")
    a.plot(steps, two, color=ORANGE, lw=1.5, label="2 ranks")
    a.set(title=f"the same training on 1 rank and on 2 (context {facts['parity_context']:,})", xlabel="step", ylabel="loss, nats per byte")
    difference = a.twinx()
    difference.semilogy(steps, np.maximum(abs(one - two), 1e-8), ".", color=GREY, ms=4, label="|difference|, right axis")
    difference.axhline(1e-4, color=GREY, ls=":", lw=1)
    difference.set_ylim(5e-9, 1)
    lines = [*a.get_lines(), difference.get_lines()[0]]
    a.legend(lines, [line.get_label() for line in lines], loc="upper right")

    done = np.arange(1, len(length["losses"]) + 1)
    b.plot(done, length["losses"], color=BLUE, marker=".", label="training")
    b.plot(*zip(*length["held_out"]), "o", color=ORANGE, label="held-out text")
    b.axhline(facts["entropy"], color=GREY, ls="--", label=f"unigram entropy, {facts['entropy']:.3f}")
    b.set(title=f"{facts['context']:,} tokens in one context, 2 ranks, {length['seconds'][-1]:.0f} s, "
                f"{length['tokens_per_second']:,.0f} tokens/s", xlabel="step", ylabel="loss, nats per byte")  # fmt: skip
    b.legend()

    bars = c.bar([str(ranks) for ranks in memory], list(memory.values()), color=BLUE, width=0.55)
    c.bar_label(bars, [f"{value:,.0f} MiB" for value in memory.values()])
    first = next(iter(memory.values()))
    c.plot(range(len(memory)), [first / ranks for ranks in memory], "_", color=ORANGE, ms=30, mew=2)
    c.set(title=f"memory per rank of one training step at {facts['context']:,} tokens", xlabel="ranks", ylabel="peak above start, MiB (line: that of 1 rank, divided)")
    c.margins(y=0.1)

    colors = matplotlib.colors.ListedColormap(["white", "#90cdf4", "#fbd38d", "#2c5282", "#c05621"])
    d.imshow(who_attends_whom(sharding), cmap=colors, vmin=-0.5, vmax=4.5, interpolation="nearest")
    d.set(title="who attends whom: zigzag over 2 ranks, 64 times smaller", xlabel="key", ylabel="query")
    names = ("rank 0 reads its own keys", "rank 1 its own", "rank 0 reads a key of rank 1", "rank 1 reads a key of rank 0")
    d.legend([plt.Rectangle((0, 0), 1, 1, color=colors(index + 1)) for index in range(4)], names, loc="upper right")
    figure.savefig(path, dpi=110)
