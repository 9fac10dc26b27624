"""The examples, as their READMEs say they are run."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


def run(example, *arguments, ranks=None, cwd=None):
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    command = [sys.executable, "-B", *launcher, EXAMPLES / example, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=1200)
    return done.returncode, done.stdout, done.stderr


def succeed(*arguments, **options):
    status, out, err = run(*arguments, **options)
    assert status == 0, err
    return out


@pytest.mark.parametrize("main", sorted(EXAMPLES.glob("[0-9][0-9]_*/main.py")), ids=lambda path: path.parent.name)
def test_numbered_examples_are_short_and_explained(main):
    assert len(main.read_text().splitlines()) < 50
    assert f"examples/{main.parent.name}/main.py" in (main.parent / "README.md").read_text()


def test_first_attention():
    out = succeed("01_first_attention/main.py")
    errors = [float(x) for x in re.findall(r"by at most (\S+)$", out, re.MULTILINE)]
    assert len(errors) == 2 and max(errors) < 1e-4
    assert "rank 7 computes" in out


@pytest.mark.parametrize("ranks", (2, 3))
def test_torchrun(ranks):
    out = succeed("02_torchrun/main.py", ranks=ranks)
    (loss, gradient), (whole_loss, whole_gradient) = [map(float, x) for x in re.findall(r"loss (\S+), gradient (\S+)", out)]
    assert loss == pytest.approx(whole_loss, abs=2e-6)
    assert gradient == pytest.approx(whole_gradient, rel=1e-3)


def test_packed_documents():
    out = succeed("03_packed_documents/main.py", ranks=2)
    assert re.findall(r": (\d+) of (\d+) outputs changed", out) == [("0", "300"), ("0", "1"), ("476", "476"), ("0", "223")]
    assert "rank 0 holds 500 tokens, 2 of them without a next token" in out


def test_hugging_face():
    pytest.importorskip("transformers")
    losses = re.findall(r"loss (\S+) on 2 ranks, (\S+) with sdpa", succeed("04_hugging_face/main.py", ranks=2))
    assert len(losses) == 2
    for ours, theirs in losses:
        assert float(ours) == pytest.approx(float(theirs), abs=5e-6)
    assert losses[0] != losses[1]  # it learned something


@pytest.mark.parametrize("ranks", (2, 4))
def test_migration(ranks):
    (loss, gradient), (ring_loss, ring_gradient) = re.findall(r"loss (\S+), gradient (\S+)", succeed("05_migration/main.py", ranks=ranks))
    assert float(loss) == pytest.approx(float(ring_loss), abs=5e-6)
    assert float(gradient) == pytest.approx(float(ring_gradient), rel=1e-4)


@pytest.mark.parametrize("folder", sorted(EXAMPLES.glob("[0-9][0-9]_*")), ids=lambda path: path.name)
def test_every_numbered_example_is_explained(folder):
    assert f"examples/{folder.name}" in (folder / "README.md").read_text()


def test_longnet_lm(tmp_path):
    """The demonstration, shortened: everything but how far it learns, which takes its 75 seconds."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    text = tmp_path / "text"
    text.write_bytes(b"".join(b"%d bottles of beer on the wall, %d bottles of beer. " % (n, n) for n in range(4000)))
    status, out, err = run("longnet_lm/run", "--text", text, "--output", tmp_path / "out", "--context", 8192, "--seconds", 4,
                           "--parity-steps", 4)  # fmt: skip
    assert "\nshown" in out, err
    assert "ok      training on 2 ranks is training on 1" in out
    assert status == (1 if "FAILED" in out else 0)
    one, two, four = (json.loads((tmp_path / "out" / f"ranks-{ranks}.json").read_text()) for ranks in (1, 2, 4))
    assert len(one["parity"]["losses"]) == len(two["parity"]["losses"]) == 4
    assert one["parity"]["losses"][0] == pytest.approx(5.545177, abs=1e-5)  # log 256: it starts by knowing nothing
    assert one["parity"]["losses"][3] < 5.0
    assert four["memory"] < one["memory"]
    assert (tmp_path / "out" / "longnet_lm.png").stat().st_size > 10_000


@pytest.mark.parametrize("option, value, text", [
    ("--parity-steps", 0, "argument --parity-steps: 0 must be at least 1"),
    ("--context", 1, "argument --context: 1 must be at least 2"),
    ("--seconds", 0, "argument --seconds: 0 must be positive and finite"),
    ("--seconds", "nan", "argument --seconds: nan must be positive and finite"),
])  # fmt: skip
def test_longnet_lm_refuses_options(option, value, text):
    status, out, err = run("longnet_lm/run", option, value)
    assert (status, out) == (2, "") and text in err


def test_longnet_lm_names_files_that_it_cannot_use(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    (tmp_path / "text").write_bytes(bytes(1 << 18))
    status, _, err = run("longnet_lm/run", "--text", tmp_path / "none", "--output", tmp_path / "out")
    assert (status, err) == (1, f"{tmp_path / 'none'} cannot be read: No such file or directory\n")
    assert not (tmp_path / "out").exists()
    status, _, err = run("longnet_lm/run", "--text", tmp_path / "text", "--output", tmp_path / "text", "--context", 8192)
    assert (status, err) == (1, f"--output {tmp_path / 'text'}: File exists\n")


def test_longnet_lm_refuses_a_short_text(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    (tmp_path / "text").write_bytes(b"short")
    status, _, err = run("longnet_lm/run", "--text", tmp_path / "text", "--output", tmp_path / "out")
    assert status == 1
    assert "is too short: 5 bytes to train on and 0 held out; each must have more than 65,536" in err
