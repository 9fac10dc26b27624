"""The tables of the pages of performance are those of the results that bench/results keeps, and bench/cpu/tables loses none."""

import itertools
import re
import shutil
import unittest

from trees import ROOT, InFolder

RESULTS = ROOT / "bench/results"
# page: results of bench/cpu/compare, and of bench/ranks/run
PAGES = {
    "performance": (
        ["2026-11-29-compare-amx", "2026-11-29-structure-amx", "2026-11-29-long-amx"],
        "2026-11-29-ranks-amx",
    ),
    "performance_without_amx": (["2026-11-30-compare-without-amx"], "2026-11-30-ranks-without-amx"),
    "performance_zen3": (["2026-11-25-compare-zen3"], None),
    "performance_zen4": (["2026-11-26-compare-quiet-zen4", "2026-11-26-structure-quiet-zen4"], "2026-11-26-ranks-quiet-zen4"),
    "performance_zen5": (["2026-11-29-compare-zen5", "2026-11-29-structure-zen5", "2026-11-29-ranks-sdpa-zen5"], "2026-11-29-ranks-zen5"),
}
COMPARE, _, LONG, RANKS = (RESULTS / f"{name}.json" for name in (*PAGES["performance"][0], PAGES["performance"][1]))


class Tables(InFolder):
    def tables(self, page, compare, ranks):
        shutil.copy(ROOT / f"docs/{page}.md", self.folder / "page.md")
        words = ["--page", "page.md", "--compare", *compare, *(["--ranks", ranks] if ranks else [])]
        return self.call(ROOT / "bench/cpu/tables", *words)

    def assert_page_stays(self, page="performance"):
        text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
        self.assertEqual((self.folder / "page.md").read_text(encoding="utf-8"), text, page)

    def test_pages_have_the_tables_of_their_results_in_any_order(self):
        for page, (compare, ranks) in PAGES.items():
            for order in itertools.permutations(compare):
                with self.subTest(page, order=order):
                    done = self.tables(page, [RESULTS / f"{name}.json" for name in order], ranks and RESULTS / f"{ranks}.json")
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assert_page_stays(page)  # else write the page again, or name its results in PAGES

    def test_summaries_have_the_means_of_their_pages(self):
        summary = (ROOT / "docs/performance.md").read_text(encoding="utf-8").splitlines()
        readme = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## How fast\n")[1].split("\n## ")[0].splitlines()
        for page in PAGES:
            with self.subTest(page):
                text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
                means = dict(re.findall(r"^\| (\w+ \w+\d) \| ([\d.]+) \|", text.split("<!-- begin means -->")[1].split("<!-- end means -->")[0], re.M))
                forward, backward = ([means[f"{direction} {dtype}"] for dtype in ("float32", "bfloat16", "float16")] for direction in ("forward", "backward"))
                place = "(this page)" if page == "performance" else f"({page}.md)"
                (row,) = (line for line in summary if line.startswith("| ") and place in line.split("|")[1])
                self.assertEqual(row.strip("| ").split(" | ")[1:], forward + backward)
                (row,) = (line for line in readme if line.startswith("| ") and f"(docs/{page}.md)" in line.split("|")[1])
                shown = [(f, b if float(b) < 10 else f"{float(b):.0f}") for f, b in zip(forward, backward)]
                self.assertEqual(row.strip("| ").split(" | ")[1:], [f"{f} · {b}" for f, b in shown])

    def test_a_part_without_data_is_not_emptied(self):
        self.assert_refused(self.tables("performance", [LONG], RANKS), "'cases'", LONG)
        self.assert_page_stays()
        self.assert_refused(self.tables("performance", [COMPARE], RANKS), "'threads'", COMPARE)
        self.assert_page_stays()

    def test_files_that_are_of_something_else(self):
        bad = self.folder / "bad.json"
        bad.write_text("{", encoding="utf-8")
        (self.folder / "list.json").write_text("[]", encoding="utf-8")
        for compare, ranks, texts in (
            ([COMPARE], COMPARE, [COMPARE, "speed_up", "bench/ranks/run"]),
            ([RANKS], RANKS, [RANKS, "cases", "bench/cpu/compare"]),
            ([bad], RANKS, [bad, "no JSON"]),
            (["list.json"], RANKS, ["list.json", "cases"]),
            ([COMPARE], self.folder / "absent.json", ["absent.json", "No such file"]),
        ):
            with self.subTest(texts):
                self.assert_refused(self.tables("performance", compare, ranks), *texts)
                self.assert_page_stays()

    def test_a_page_that_is_not_there(self):
        for page in ("absent.md", "absent/page.md", "."):
            with self.subTest(page):
                self.assert_refused(self.call(ROOT / "bench/cpu/tables", "--page", page, "--compare", COMPARE), page)
        self.assertEqual(self.names(), [])


if __name__ == "__main__":
    unittest.main()
