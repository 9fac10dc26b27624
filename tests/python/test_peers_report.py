"""docs/comparison.md has the tables of the results that bench/results keeps. The measurements themselves are not repeated here."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables():
    folder = str(ROOT / "bench/peers")
    sys.path.insert(0, folder)
    import tables

    yield tables
    sys.path.remove(folder)


def newest():
    return json.loads(max((ROOT / "bench/results").glob("*-peers.json")).read_text())


def test_the_page_has_the_tables_of_the_results(tables):
    page = (ROOT / "docs/comparison.md").read_text()
    assert tables.fill(page, newest()) == page, "run bench/peers/report"


def test_an_error_beyond_rounding_is_marked(tables):
    results = newest()
    seen = results["times"]["ringspan"]["1-full-4096"]["both"]
    assert tables.MARK not in tables.times({"times": {"ringspan": results["times"]["ringspan"]}}, ["1-full-4096"])
    seen["errors"]["dk"] = 0.5
    marked = tables.times({"times": {"ringspan": results["times"]["ringspan"]}}, ["1-full-4096"])
    assert marked.count(tables.MARK) == 1
    assert f"0.50 {tables.MARK}" in tables.errors(dict(results, checks={}))


def test_errors_are_judged_by_the_largest_true_value(tables):
    case = tables.TIMED["1-full-4096"]
    for largest in (0.01, 1.0, 100.0):
        for share, bad in ((0.9e-4, []), (1.1e-4, ["dk"]), (float("nan"), ["dk"])):
            reply = {"errors": {"o": 0.0, "dk": share * largest}, "largest": {"o": largest, "dk": largest}}
            assert [name for name, _ in tables.wrong(case, reply)] == bad, (largest, share)


def test_a_page_without_a_block_is_refused(tables):
    with pytest.raises(ValueError, match="no block"):
        tables.fill("nothing here", newest())


def test_no_error_lies_outside_the_picture(tables, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    import charts

    monkeypatch.setattr(charts.plt, "close", lambda _: None)
    charts.errors(newest(), tmp_path / "errors.png")
    (axis,) = charts.plt.gcf().axes
    monkeypatch.undo()
    charts.plt.close()
    low, high = axis.get_xlim()
    points = [x for line in axis.lines for x in line.get_xdata()]
    assert len(points) > 20
    assert low < min(points) and max(points) < high
