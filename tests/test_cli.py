"""The command line, as a user meets it: it trains, and every mistake is one clear screen and an exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from phalanx import Run, cli, user_code
from phalanx.events import SHARED_OF_A_STEP
from tests.forking import fork

TASK = Path(__file__).with_name("tasks.py")
GOOD = TASK.read_text()


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


def _child(
    function: Callable[..., None], args: tuple[Any, ...], options: dict[str, Any], cwd: Path, out: Path, err: Path
) -> None:
    os.chdir(cwd)
    for stream, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    function(*args, **options)


def run_forked(function: Callable[..., None], *args: Any, cwd: Path, **options: Any) -> Done:
    """A function in a process of its own, forked from a warm one: a fresh one would import torch for seconds."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = fork(_child, function, args, options, cwd, out, err)
        process.join(timeout=60)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"it did not end in 60 s: {out.read_text()}{err.read_text()}")
        return Done(process.exitcode, out.read_text(), err.read_text())


def main(*words: str) -> None:
    """The command line, in a process of its own."""
    for name in user_code.modules().keys() - {"__main__"}:  # all tests: no process of a user's has imported them
        del sys.modules[name]
    sys.argv = ["phalanx", *words]
    cli.main()


def phalanx(*words: str, cwd: Path) -> Done:
    """The command itself."""
    return run_forked(main, *words, cwd=cwd)


def test_train_leaves_a_run_that_can_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    done = phalanx("train", "mine.py", "--layout", "fsdp=2,zero=2", "--set", "width=24", "--steps", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "trained Digits for 5 steps on fsdp=2,zero=2" in done.stdout
    assert "parameter float32" in done.stdout
    run = Run(tmp_path / "runs" / "mine-001")
    settings = tomllib.loads(run.settings_path.read_text())
    place = {
        "task": str(tmp_path / "mine.py"),
        "folder": str(tmp_path),
        "layout": "fsdp=2,zero=2",
        "on": "local:2",
        "device": "cpu",
        "timeout": 600.0,
    }
    assert settings["run"] == place
    assert (settings["settings"]["width"], settings["settings"]["steps"]) == (24, 5)
    events = [list(run.events(rank)) for rank in range(2)]
    assert events[0].pop(0).items() >= {"kind": "check", "warnings": [], "left_out": ""}.items()
    kinds = [event["kind"] for event in events[0] if event["kind"] != "pause"]  # which a busy machine may have
    assert kinds == ["start", *["step"] * 5, "checkpoint", "evaluation", "end"]
    assert {"step", "loss", "grad_norm", "lr", "samples", "seconds"} <= events[0][1].keys()
    assert [event["kind"] for event in events[1]] == ["start", *["step"] * 5]
    own = {"kind", "time", "step", "seconds", "sent", "checkpoint_seconds", "exposed_fsdp", "memory_peak"}
    assert own <= events[1][1].keys()
    assert not SHARED_OF_A_STEP & events[1][1].keys(), "only what is its own"
    assert load_file(run.weights_path)["0.weight"].shape == (24, 4)

    config = str(run.settings_path)
    again = phalanx("train", "--config", config, "--run", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert [e.get("loss") for e in Run(tmp_path / "again").events(0)][1:] == [e.get("loss") for e in events[0]]
    refused = phalanx("train", "--config", config, "--run", "again", cwd=tmp_path)
    assert refused.returncode == 2
    assert "holds a run already" in refused.stderr


PACKAGED = GOOD.replace(
    "class Silent", "from .sizes import SAMPLES\nfrom pkg.sizes import WIDTH\n\n\nclass Silent"
).replace("samples: int = 40", "samples: int = SAMPLES")


def package(folder: Path, init: bool = True) -> None:
    (folder / "pkg").mkdir()
    (folder / "pkg" / "task.py").write_text(PACKAGED.replace("width: int = 16", "width: int = WIDTH"))
    (folder / "pkg" / "sizes.py").write_text("SAMPLES, WIDTH = 48, 12\n")
    if init:
        (folder / "pkg" / "__init__.py").touch()


@pytest.mark.parametrize(("words", "there", "init"), [
    pytest.param(words, there, init, marks=[] if init is quick else [pytest.mark.every])
    for words, there, quick in [
        ("pkg.task:Digits", ".", True), ("pkg.task", ".", False), ("pkg/task.py:Digits", ".", True),
        ("task.py", "pkg", False), ("../pkg/task.py", "other", True),
    ]
    for init in (True, False)
])  # fmt: skip
def test_a_task_in_a_package_is_found_from_any_folder(tmp_path: Path, words: str, there: str, init: bool) -> None:
    package(tmp_path, init)
    (tmp_path / "other").mkdir()
    done = phalanx(
        "train", words, "--on", "local:2", "--steps", "2", "--set", "workers=1", "--run", "run", cwd=tmp_path / there
    )
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / there / "run")
    assert run.settings()["settings"]["width"] == 12
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = phalanx("train", "--resume", "--steps", "3", "--run", str(run.path), cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert "where the run was started" in done.stdout
    done = phalanx("prove", words, "--layouts", "dp=2", "--steps", "1", cwd=tmp_path / there)
    assert done.returncode == 0, done.stderr


def test_exact_runs_leave_the_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    runs = {
        "one": ["mine.py", "--exact"],
        "four": ["--config", "one/run.toml", "--exact", "--on", "local:4"],
        "shards": ["--config", "one/run.toml", "--layout", "dp=2,fsdp=2,exact=8"],
    }
    for run, words in runs.items():
        done = phalanx("train", *words, "--run", run, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert len({Run(tmp_path / run).weights_path.read_bytes() for run in runs}) == 1
    assert tomllib.loads((tmp_path / "four" / "run.toml").read_text())["run"]["layout"] == "dp=4,exact=8"
    told = [[(e.get("loss"), e.get("grad_norm"), e.get("held_out")) for e in Run(tmp_path / r).events(0)] for r in runs]
    assert told[0] == told[1] == told[2]
    refused = phalanx("train", "mine.py", "--exact", "--on", "local:3", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.strip().endswith("The nearest layout that works: dp=2,exact=8 on 2 ranks")


def test_a_dry_run_says_what_would_run_and_leaves_nothing(tmp_path: Path) -> None:
    done = phalanx("train", "gpt", "--layout", "dp=2,fsdp=2,micro_batch=2", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in (
        "gpt (GPT)",
        "dp=2,fsdp=2,micro_batch=2 on 4 ranks on this machine's CPU",
        "2 micro-batches",
        "compute float32",
        "4 blocks by structure",
        "4 x Block",
        "9.25 MiB a rank without activations",
    ):
        assert part in done.stdout
    assert not list(tmp_path.iterdir())
    (tmp_path / "mine.py").write_text(GOOD)
    done = phalanx("train", "mine.py", "--set", "samples=3", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "fewer than one batch" in done.stderr
    done = phalanx("train", "mine.py", "--set", "mistake=a tensor", "--dry-run", cwd=tmp_path)
    assert done.returncode == 2
    assert "returned a tensor, which has no count to divide by" in done.stderr


CHOICES = """
import enum
from dataclasses import dataclass
from tests.tasks import Digits

class Size(enum.Enum):
    SMALL = 8
    LARGE = 24

@dataclass
class Chosen(Digits):
    size: Size = Size.SMALL
    limit: float | None = 2.0

    def model(self):
        assert self.limit is None
        self.width = self.size.value
        return super().model()
"""


def test_fields_of_every_kind_are_repeated(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CHOICES)
    done = phalanx("train", "mine.py", "--set", "size=LARGE", "--set", "limit=none", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    again = phalanx("train", "--config", "runs/mine-001/run.toml", "--run", "again", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert load_file(tmp_path / "again" / "final" / "model.safetensors")["0.weight"].shape == (24, 4)


def test_a_run_in_which_every_step_was_skipped_does_not_hold(tmp_path: Path) -> None:
    task = "from tests.tasks import Digits\nclass Spoilt(Digits):\n    spoil: int = 0\n    samples: int = 8\n"
    (tmp_path / "mine.py").write_text(task.replace("class", "from dataclasses import dataclass\n@dataclass\nclass"))
    done = phalanx("train", "mine.py", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "learned nothing: every step was skipped" in done.stderr


SECRET = """
from dataclasses import dataclass
from tests.tasks import Digits

@dataclass
class Mine(Digits):
    api_key: str = ""

    def data(self):
        assert self.api_key == "HUSH"
        if self.mistake == "told":
            raise OSError("sftp://me:HUSH@host/ did not answer")
        return super().data()
"""


def test_no_secret_is_written_or_printed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SECRET)
    url, key = f"local://{tmp_path}/kept?token=HUSH", ("--set", "api_key=HUSH")
    words = ("mine.py", *key, "--checkpoints", url, "--run", "run")
    done = [phalanx("train", *words, "--steps", "2", cwd=tmp_path)]
    assert done[0].returncode == 0, done[0].stderr
    assert [path.name[:13] for path in (tmp_path / "kept?token=HUSH").glob("step-*")] == ["step-00000002"]
    assert (tmp_path / "run" / "run.toml").stat().st_mode & 0o777 in (0o600, 0o640)

    on = ("train", "--resume", "--run", "run", "--steps", "3")
    refused = {
        "Give --checkpoints again": phalanx(*on, *key, cwd=tmp_path),
        "Give it again: --set api_key=": phalanx(*on, "--checkpoints", url, cwd=tmp_path),
        "Give that URL itself": phalanx("verify", "run", cwd=tmp_path),
        "Give that URL with --checkpoints": phalanx("export", "run", "--to", "to", cwd=tmp_path),
    }
    for advice, refusal in refused.items():
        assert refusal.returncode == 2, refusal.stderr
        assert advice in refusal.stderr
    done += [
        phalanx(*on, *key, "--checkpoints", url, cwd=tmp_path), phalanx("verify", url, cwd=tmp_path),
        phalanx("export", "run", "--to", "to", "--checkpoints", url, "--format", "safetensors", cwd=tmp_path),
        phalanx("train", *words, "--dry-run", cwd=tmp_path),
    ]  # fmt: skip
    assert [one.returncode for one in done] == [0] * 5, done
    told = phalanx("train", "mine.py", *key, "--set", "mistake=told", "--run", "told", cwd=tmp_path)
    assert told.returncode == 1
    assert "sftp://me:***@host/" in told.stderr
    files = [path for name in ("run", "told", "to") for path in (tmp_path / name).rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        assert b"HUSH" not in path.read_bytes(), path
    for one in [*done, *refused.values(), told]:
        assert "HUSH" not in one.stdout + one.stderr


def test_a_refused_resume_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    assert phalanx("train", "mine.py", "--run", "run", "--steps", "2", cwd=tmp_path).returncode == 0
    run = Run(tmp_path / "run")
    before = run.settings_path.read_bytes(), run.certificate_path.read_bytes()
    done = phalanx("train", "--resume", "--run", "run", "--steps", "3", "--set", "width=24", cwd=tmp_path)
    assert done.returncode in (2, 3), done.stderr
    assert (run.settings_path.read_bytes(), run.certificate_path.read_bytes()) == before
    (tmp_path / "mine-2.py").write_text(GOOD)
    done = phalanx("train", "mine-2.py", "--resume", "--run", "run", "--steps", "3", cwd=tmp_path)
    assert done.returncode == 2
    assert "is a run of another task" in done.stderr
    assert (run.settings_path.read_bytes(), run.certificate_path.read_bytes()) == before


def test_odd_values_are_repeated(tmp_path: Path) -> None:
    field = "from dataclasses import dataclass\nfrom tests.tasks import Digits\n@dataclass\nclass Mine(Digits):\n"
    (tmp_path / "mine.py").write_text(field + "    größe: str = ''\n    seen: str = ''\n")
    odd = ("--set", "größe=a\x7f\n\"'", "--set", f"seen={os.fsdecode(b'caf' + bytes([233]))}")
    assert phalanx("train", "mine.py", *odd, "--steps", "1", "--run", "run", cwd=tmp_path).returncode == 0
    done = phalanx("train", "--resume", "--run", "run", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = Run(tmp_path / "run").settings()["settings"]
    assert found["größe"] == "a\x7f\n\"'"
    assert os.fsencode(found["seen"]) == b"caf\xe9"


MISTAKES = {
    "an unknown field": (["--set", "wdith=3"], "no field 'wdith'; did you mean 'width'"),
    "a value of another type": (["--set", "width=wide"], "width='wide' is not a whole number"),
    "a layout that does not divide": (["--layout", "dp=3", "--on", "local:4"], "needs 3 ranks and there are 4"),
    "a layout with a typing error": (["--layout", "fspd=2"], "did you mean 'fsdp'"),
    "a batch too small for the ranks": (["--on", "local:9"], "global_batch=8 is less than the 9 ranks"),
    "a place that is not known": (["--on", "slum"], "did you mean 'slurm'"),
    "a number of ranks that is none": (["--on", "local:two"], "Write it like local:2"),
    "a data set smaller than a batch": (["--set", "samples=5"], "5 samples, fewer than one batch of 8"),
    "a loss without a count": (["--set", "mistake=a tensor"], "has no count to divide by"),
    "a loss with half of it": (["--set", "mistake=no count"], "without a count of its terms"),
    "a loss that is one number": (["--set", "mistake=a number"], "not a sum and a count"),
    "no time to wait": (["--timeout", "-1"], "Give seconds above 0"),
    "a learning rate that is none": (["--set", "learning_rate=nan"], "learning_rate=nan is no rate"),
    "a folder that cannot be": (["--run", "/proc/none"], "Give another folder with --run"),
    "a file for a folder": (["--run", "mine.py"], "Give another folder with --run"),
    "a loss without a way back": (["--set", "mistake=detached"], "does not depend on any trainable weight"),
    "a column that is not there": (["--set", "mistake=no column"], "the batch has no 'z'; choose one of: x, y"),
    "a model that gives nothing": (["--set", "mistake=no output"], "forward of Silent returned nothing"),
    "a measure that is a number": (["--set", "mistake=measure"], "evaluate gave a float"),
    "nothing held out": (["--set", "mistake=empty"], "held_out is empty"),
    "a recompute that is none": (["--layout", "dp=1,recompute=ful"], "did you mean 'full'"),
}
BROKEN = {
    "a syntax error": ("def f(:\n", "mine.py, line 1: invalid syntax"),
    "a file that fails": ("import torch\ntorch.nope\n", "mine.py, line 2: torch.nope"),
    "no model": (GOOD.replace("def model(self)", "def modle(self)"), "Digits has no model()"),
    "no dataclass": (GOOD.replace("@dataclass\n", ""), "Put @dataclass above"),
}


def refused(done: Done, expected: str, cwd: Path) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    assert expected in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) < 12
    assert done.stderr.startswith("phalanx: ")
    assert not list((cwd / "runs").glob("*")), "a run that did nothing left its folder"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_clear_screen(tmp_path: Path, mistake: str) -> None:
    words, expected = MISTAKES[mistake]
    (tmp_path / "mine.py").write_text(GOOD)
    refused(phalanx("train", "mine.py", *words, cwd=tmp_path), expected, tmp_path)


REFUSED: list[tuple[list[str], str]] = [
    (["train", "mine.py", "--layout", "dp=1000000000"], "1,000,000,000 ranks are more than can be"),
    (["train", "mine.py", "--on", "local:99999"], "The nearest layout that works: dp=8 on 8 ranks"),
    (["train", "mine.py", "--max-nodes", "9" * 30, "--meet", "a:1"], "Ask for fewer"),
    (["train", "mine.py", "--on", "local:²"], "Write it like local:2"),
    (["train", "mine.py", "--kill", "²@1"], "Write it like --kill 1@60"),
    (["train", "mine.py", "--on", f"local:{'9' * 5000}"], "Write it like local:2"),
    (["train", "mine.py", "--set", "steps=1e400"], "is not a whole number"),
    (["train", "mine.py", "--set", f"steps={'9' * 5000}"], "is not a whole number"),
    (["train", "mine.py", "--steps", "9" * 30], "Set steps to"),
    (["train", "mine.py", "--set", f"seed={'9' * 30}"], "Set seed to"),
    (["train", "mine.py", "--timeout", "inf"], "Give seconds above 0"),
    (["train", "mine.py", "--timeout", "nan"], "Give seconds above 0"),
    (["train", "mine.py", "--save-minutes", "inf"], "Give 0 for never"),
    (["train", "mine.py", "--grace", "1e30"], "Give at most"),
    (["train", "mine.py", "--spike", "nan"], "--spike"),
    (["train", "mine.py", "--run", "x" * 300], "Give another folder with --run"),
    (["train", "mine.py", "--run", "/proc/self"], "is a link, which is not followed"),
    (["train", "mine.py", "--config", "."], "is a folder and not a file"),
    (["train", "mine.py", "--config", sys.executable], "is not valid TOML"),
    (["train", "mine.py", "--config", "pipe"], "is a pipe and not a file"),
    (["train", "mine.py", "--config", "odd.toml"], "timeout='x' is not a number"),
    (["train", "mine.py", "--config", "number.toml"], "layout = 3 in number.toml is not text"),
    (["train", "mine.py", "--config", "x" * 300], "cannot be read"),
    (["train", "mine.py", "--max-nodes", "2", "--meet", "²", "--run", "r"], "Write it as host:port"),
    (["train", "."], "is neither a recipe nor a Python file"),
    (["train", "folder.py"], "is not there"),
    (["train", "pipe.py"], "is not there"),
    (["train", "x" * 300 + ".py"], "is not there"),
    (["train", "binary.py"], "phalanx: binary.py: source code"),
    (["train", "--config", "none.toml"], "there is no task to train"),
    (["train", "--resume"], "there is no run here to go on with"),
    (["train", "--resume", "--run", "x" * 300], "holds no run to go on with"),
    (["prove", "mine.py", "--layouts", "dp=1000000000"], "Ask for"),
    (["prove", "mine.py", "--ranks", "99999"], "Ask for"),
    (["prove", "mine.py", "--layouts", "dp=²"], "is not a whole number"),
    (["prove", "mine.py", "--steps", "9" * 30], "Give at most 10,000"),
    (["prove", "mine.py", "--run", "x" * 300], "Give another folder with --run"),
    (["verify", "x" * 300], "is not there"),
    (["verify", "nowhere://x"], "cannot be opened"),
    (["export", "x" * 300, "--to", "to"], "is not there"),
    (["export", "folder.py", "--to", "to"], "there is no checkpoint"),
]


@pytest.mark.parametrize(
    ("words", "expected"), REFUSED, ids=lambda given: " ".join(given)[:60] if isinstance(given, list) else ""
)
def test_what_cannot_work_is_refused_in_one_line(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["phalanx", *words])
    monkeypatch.setattr("sys.path", sys.path[:])
    Path("mine.py").write_text(GOOD)
    Path("binary.py").write_bytes(b"\x00\xff\x7fELF")
    Path("odd.toml").write_text('[run]\ntimeout = "x"\n')
    Path("number.toml").write_text("[run]\nlayout = 3\n")
    Path("none.toml").write_text("[settings]\nwidth = 3\n")
    Path("folder.py").mkdir()
    os.mkfifo("pipe")
    os.mkfifo("pipe.py")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)}
    began = time.monotonic()
    code = cli.exit_code()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    told = capsys.readouterr()
    assert code in (2, 3), told
    assert expected in told.out + told.err
    assert "Traceback" not in told.err
    assert len(told.err.splitlines()) <= 2
    assert not list(Path("runs").glob("*"))
    assert time.monotonic() - began < 20, "it hung"


@pytest.mark.parametrize("mistake", BROKEN)
def test_a_broken_file_is_one_clear_screen(tmp_path: Path, mistake: str) -> None:
    text, expected = BROKEN[mistake]
    (tmp_path / "mine.py").write_text(text)
    refused(phalanx("train", "mine.py", cwd=tmp_path), expected, tmp_path)


@pytest.mark.parametrize(
    ("words", "expected"),
    [(["mien.py"], "did you mean 'mine.py'"), ([], "no task to train"), (["gtp"], "did you mean 'gpt'")],
)
def test_a_task_that_is_not_there(tmp_path: Path, words: list[str], expected: str) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    refused(phalanx("train", *words, cwd=tmp_path), expected, tmp_path)


def test_more_gpus_than_there_are_is_the_environments_fault(tmp_path: Path) -> None:
    done = phalanx("train", "gpt", "--on", "local:512", "--device", "cuda", "--set", "global_batch=512", cwd=tmp_path)
    assert done.returncode == 3
    assert "this machine has" in done.stderr


def test_an_error_in_the_task_names_its_rank_and_line(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    done = phalanx("train", "mine.py", "--on", "local:3", "--set", "mistake=rank 1 fails", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "rank 1 failed first: AssertionError"
    assert 'assert os.environ["RANK"] != "1"' in done.stderr
    assert sorted(line for line in lines[1:] if line.startswith("rank ")) == [
        f"rank {rank}: lost its connection to a rank that ended" for rank in (0, 2)
    ]
    reasons = [event["reason"] for event in Run(tmp_path / "runs" / "mine-001").events(1) if event["kind"] == "failure"]
    assert reasons == ["AssertionError: "]


def test_a_task_is_checked_before_its_first_step(tmp_path: Path) -> None:
    task = f"{Path(__file__).with_name('mistakes.py')}:MeanAndOne"
    done = phalanx("train", task, "--on", "local:2", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search(r"^phalanx: MeanAndOne.loss is a mean and a count of 1 \(.*mistakes.py:\d+: return", done.stderr)
    assert done.stderr.count("\n") == 1
    assert not list((tmp_path / "runs").glob("*"))
    proof = phalanx("prove", task, "--layouts", "dp=2", cwd=tmp_path)
    assert proof.returncode == 2
    assert proof.stderr == done.stderr
    done = phalanx("train", task, "--on", "local:2", "--unchecked", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the task was not checked (--unchecked)" in done.stdout
    again = phalanx("train", "--config", "run/run.toml", "--run", "again", cwd=tmp_path)
    assert "the task was not checked (--unchecked)" in again.stdout


def test_what_is_likely_is_said_and_trained(tmp_path: Path) -> None:
    task = f"{Path(__file__).with_name('mistakes.py')}:MatricesAlone"
    done = phalanx("train", task, "--on", "local:2", "--kill", "1@2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning  0.bias, 2.bias are trainable and in no group of MatricesAlone.optimizer") == 1
    assert "not checked" not in done.stdout


def test_a_wrong_shape_is_a_short_screen_and_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD.replace("nn.Linear(self.width, 3)", "nn.Linear(self.width + 1, 3)"))
    done = phalanx("train", "mine.py", "--on", "local:2", "--run", "run", cwd=tmp_path)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) < 12, done.stderr
    assert "2 (Linear) got float32 [4, 16]; it expects float32 [..., 17]" in lines[1]
    assert "of phalanx and torch" in done.stderr
    (name,) = (line.rpartition("/")[2] for line in lines if line.startswith("the whole traceback is in run/failures/"))
    file = tmp_path / "run" / "failures" / name
    assert "train/step.py" in file.read_text()
    assert "train/step.py" not in done.stderr


TYPES = {
    "a torch schedule": (
        "def schedule(self):\n        return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)]), 30)",
        "schedule returned a StepLR of torch",
        "return lambda step: 0.1 ** (step // 30)",
    ),
    "a rate for a schedule": (
        "def schedule(self):\n        return 0.5",
        "schedule returned 0.5",
        "return lambda step: 1.0",
    ),
    "a schedule of text": (
        "def schedule(self):\n        return str",
        "schedule gives text for step 0",
        "return lambda step: 1.0",
    ),
    "an optimizer's class": (
        "def optimizer(self, params):\n        return torch.optim.Adam",
        "optimizer returned the class Adam",
        "Adam(params, lr=...)",
    ),
    "an optimizer and a schedule": (
        "def optimizer(self, params):\n        return torch.optim.Adam(params), None",
        "optimizer returned a tuple",
        "the task's schedule()",
    ),
}


@pytest.mark.parametrize("mistake", TYPES)
def test_another_type_than_wanted_is_named_with_the_line_to_write(tmp_path: Path, mistake: str) -> None:
    method, named, line = TYPES[mistake]
    (tmp_path / "mine.py").write_text(GOOD.replace("    def inputs(", f"    {method}\n\n    def inputs("))
    done = phalanx("train", "mine.py", cwd=tmp_path)
    refused(done, named, tmp_path)
    assert line in done.stderr


def test_json_is_one_object_whatever_the_task_prints(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD + "\nprint('imported')\n")
    done = phalanx("prove", "mine.py", "--layouts", "dp=2", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["holds"]
    assert "imported" in done.stderr


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GOOD)
    assert phalanx("train", "mine.py", "--steps", "6", "--run", "run", cwd=tmp_path).returncode == 0
    (tmp_path / "run" / "final" / "certificate.json").unlink()  # as if it had been stopped
    before = (tmp_path / "run" / "run.toml").read_text()
    done = phalanx("train", "--resume", "--run", "run", "--steps", "4", cwd=tmp_path)
    assert done.returncode == 2
    assert "is at step 6 already. Give --steps 7 or more" in done.stderr
    assert (tmp_path / "run" / "run.toml").read_text() == before


def test_help_is_there_and_quick() -> None:
    done = subprocess.run([sys.executable, "-m", "phalanx", "train", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for option in ("--layout", "--on", "--set", "--steps", "--run", "--config", "--dry-run"):
        assert option in done.stdout
    for module in ("cli", "watch.page.server", "launch.standing"):
        check = f"import phalanx.{module}, sys; print('torch' in sys.modules)"
        loaded = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
        assert loaded.stdout.strip() == "False", f"{module}: help, or a list of runs, waits for torch"


def test_prove_tells_and_train_knows_of_it(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(GOOD)
    done = phalanx("prove", "task.py", "--layouts", "dp=2", "fsdp=2,zero=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "= dp=2 " in done.stdout
    assert "trains like one device under 2 layouts" in done.stdout
    assert {path.name for path in (tmp_path / "runs" / "prove-task-001").iterdir()} == {"proof.json", "junit.xml"}
    assert (
        "dp=2 trains like one device"
        in phalanx("train", "task.py", "--layout", "dp=2", "--steps", "1", cwd=tmp_path).stdout
    )
    elsewhere = phalanx("train", "task.py", "--layout", "dp=2", "--steps", "1", "--run", "other/one", cwd=tmp_path)
    assert f"dp=2 trains like one device in float64: {tmp_path}/runs/prove-task-001" in elsewhere.stdout
    (tmp_path / "task.py").write_text(GOOD + "\n# changed\n")
    again = phalanx("train", "task.py", "--layout", "dp=2", "--steps", "1", cwd=tmp_path).stdout
    assert "not proven for this code" in again
    assert "phalanx prove task.py --layouts dp=2" in again


def test_prove_prints_json_and_an_exit_code(tmp_path: Path) -> None:
    done = phalanx("prove", "gpt", "--inject", "sum_goes_to_a_copy", "--json", cwd=tmp_path)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert told["inject"] == "sum_goes_to_a_copy"
    finding = told["results"][0]["finding"]
    assert (finding["rung"], finding["shape"], finding["axes"]) == ("gradients", "missing sum", ["dp"])
    assert finding["where"].endswith(".py:" + finding["where"].rpartition(":")[2])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "there is no task to prove"),
        (("gpt", "--inject", "nothing"), "'nothing' is not a bug"),
        (("gpt", "--layouts", "dq=2"), "dq"),
        (("gpt", "--layouts", "dp=2", "--ranks", "4"), "do not go together"),
        (("gpt", "--steps", "0"), "--steps 0"),
        (("gpt", "--ranks", "0"), "--ranks 0"),
        (("gpt", "--dtype", "int8"), "--dtype int8"),
    ],
)
def test_prove_refuses_wrong_words(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    done = phalanx("prove", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("runs/*/proof.json"))


def test_bugs_are_listed(tmp_path: Path) -> None:
    done = phalanx("prove", "--inject", "list", cwd=tmp_path)
    assert done.returncode == 0
    assert "norms_not_summed_over_tp" in done.stdout
