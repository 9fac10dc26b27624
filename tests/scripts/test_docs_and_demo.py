"""scripts/docs and scripts/demo: what they remove, and what they are given."""

import os
import unittest

from trees import InFolder


class Docs(InFolder):
    def setUp(self):
        super().setUp()
        self.docs = self.tree("scripts/docs", "docs/requirements.txt") / "scripts/docs"

    def make(self, venv):
        # Without packages to install: pip fails, and ends the script.
        environment = {**os.environ, "RINGSPAN_DOCS_VENV": venv, "PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1"}
        return self.call(self.docs, env=environment)

    def test_a_folder_that_it_did_not_make_stays(self):
        (self.folder / "mine").mkdir()
        text = self.folder / "mine/thesis.txt"
        text.write_text("text", encoding="utf-8")
        for venv in ("mine", str(self.folder / "mine"), "mine/thesis.txt"):
            with self.subTest(venv):
                self.assert_refused(self.make(venv), venv, "holds something else")
                self.assertEqual(text.read_text(encoding="utf-8"), "text")

    def test_one_that_it_began_to_make_is_made_again(self):
        (self.folder / "new").mkdir()
        for name in (".packages", "left"):
            (self.folder / "new" / name).touch()
        done = self.make("new")
        self.assertNotEqual(done.returncode, 0)
        self.assertIn(f"docs: making {self.folder / 'new'}", done.stdout)
        self.assertLessEqual({".packages", "pyvenv.cfg"}, set(self.names("new")))
        self.assertNotIn("left", self.names("new"))

    def test_unknown_words(self):
        for words in (["--bogus"], ["--serve", "more"], [""]):
            with self.subTest(words):
                self.assert_refused(self.call(self.docs, *words), "usage: scripts/docs [--serve]")


class Demo(InFolder):
    def setUp(self):
        super().setUp()
        self.demo = self.tree("scripts/demo") / "scripts/demo"

    def test_the_program_is_where_the_caller_stands(self):
        self.program(self.folder / "mine", 'echo "called: $1"; exit 3')
        done = self.call(self.demo, "mine")
        self.assertIn("called: inspect", done.stdout)
        self.assertEqual(done.returncode, 3)

    def test_without_a_program_it_says_how_to_build_one(self):
        self.assert_refused(self.call(self.demo), "build/release/bin/ringspan", "make build")
        self.assert_refused(self.call(self.demo, "absent"), self.folder / "absent")
        self.assert_refused(self.call(self.demo, "--help"), "usage: scripts/demo [PROGRAM]")


if __name__ == "__main__":
    unittest.main()
