"""Every command line of the program in README.md, the guides and the pages for beginners runs as it stands there; what plan draws is up to date."""

import os
import pathlib
import re
import shlex
import subprocess
import tempfile
import unittest

PROGRAM = os.environ["RINGSPAN_PROGRAM"]
ROOT = pathlib.Path(os.environ["RINGSPAN_SOURCE"])
PAGES = [ROOT / "README.md", *(ROOT / "docs" / name for name in ("start.md", "longnet.md")), *sorted((ROOT / "docs/guides").glob("*.md"))]


def command_lines(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(r"^    (ringspan [^#\n]*)", text, re.MULTILINE)


class CommandLines(unittest.TestCase):
    def test_every_one_runs(self):
        lines = {" ".join(line.split()): page for page in PAGES for line in command_lines(page)}  # each once
        self.assertGreater(len(lines), 7)
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "examples").symlink_to(ROOT / "examples")
            for line, page in lines.items():
                with self.subTest(line, page=page.name):
                    arguments = [PROGRAM, *shlex.split(line)[1:]]
                    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=500, check=False)
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_drawings_are_those_of_their_commands(self):
        def drawn(command):
            return subprocess.run([PROGRAM, *shlex.split(command)[1:]], capture_output=True, text=True, timeout=500, check=True).stdout

        mission = (ROOT / "docs/mission.md").read_text(encoding="utf-8")
        (command,) = re.findall(r"`(ringspan plan [^`]* --draw svg)`", mission)
        self.assertEqual((ROOT / "docs/pictures/dilated.svg").read_text(encoding="utf-8"), drawn(command))
        plan = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
        ((command, text),) = re.findall(r"^    \$ (ringspan plan .* --draw text)\n((?:    .*\n)+)", plan, re.MULTILINE)
        self.assertEqual(re.sub("^    ", "", text, flags=re.MULTILINE), drawn(command))


if __name__ == "__main__":
    unittest.main()
