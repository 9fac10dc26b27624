"""scripts/gpu-bundle makes and replaces bundles, and nothing else."""

import pathlib
import unittest

from trees import ROOT, InFolder

BUNDLE = ROOT / "scripts/gpu-bundle"
PACKAGES = ("fmt", "nlohmann", "CLI", "rapidcheck")


class Bundle(InFolder):
    def test_what_it_did_not_make_stays(self):
        (self.folder / "mine").mkdir()
        text = self.folder / "mine/thesis.txt"
        text.write_text("text", encoding="utf-8")
        self.assert_refused(self.call(BUNDLE, "mine"), text, "an earlier bundle was expected")
        self.assert_refused(self.call(BUNDLE, "mine/thesis.txt"), text)
        (self.folder / "mine/lib").mkdir()  # a name that bundles have, too
        text.rename(self.folder / "mine/lib/thesis.txt")
        self.assert_refused(self.call(BUNDLE, "mine"), self.folder / "mine/lib")
        self.assertEqual((self.folder / "mine/lib/thesis.txt").read_text(encoding="utf-8"), "text")

    def test_words_that_are_no_folder(self):
        for words in (["--help"], [""], ["a", "b"], ["-", "b", "c"]):
            with self.subTest(words):
                self.assert_refused(self.call(BUNDLE, *words), "usage: scripts/gpu-bundle [FOLDER]")
        self.assertEqual(self.names(), [])

    @unittest.skipUnless(all(pathlib.Path("/usr/include", name).exists() for name in PACKAGES), "the packages are not Debian's")
    def test_a_bundle_is_made_where_the_caller_stands_and_made_again(self):
        done = self.call(BUNDLE, "docs")  # the repository has a folder of this name
        self.assertEqual(done.returncode, 0, done.stderr)
        (self.folder / "docs/include/old.h").touch()
        done = self.call(BUNDLE, "docs")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(self.names(), ["docs"])
        self.assertEqual(self.names("docs"), ["include", "lib", "src"])
        self.assertNotIn("old.h", self.names("docs/include"))
        (self.folder / "docs/notes.txt").touch()
        self.assert_refused(self.call(BUNDLE, "docs"), self.folder / "docs/notes.txt")


if __name__ == "__main__":
    unittest.main()
