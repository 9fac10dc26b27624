"""Calls of the repository's scripts, and copies of them in trees of their own."""

import pathlib
import shutil
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class InFolder(unittest.TestCase):
    """Each test has an empty folder, self.folder, where it stands."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()

    def call(self, script, *words, **more):
        command = [script, *map(str, words)]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False, **more)

    def assert_refused(self, done, *texts):
        """By a message, which names `texts`, and not by a traceback."""
        self.assertNotEqual(done.returncode, 0, done.stdout)
        self.assertNotIn("Traceback", done.stderr)
        for text in texts:
            self.assertIn(str(text), done.stderr)

    def tree(self, *scripts):
        """A repository that has only copies of these."""
        for script in scripts:
            (self.folder / "tree" / script).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / script, self.folder / "tree" / script)
        return self.folder / "tree"

    def program(self, path, text):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
        path.chmod(0o755)
        return path

    def names(self, folder="."):
        return sorted(path.name for path in (self.folder / folder).iterdir())
