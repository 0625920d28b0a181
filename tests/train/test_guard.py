"""Bad numbers: what is bad, what is done about it, and that all ranks do the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from phalanx import Run, WrongUse
from phalanx.train.guard import IN_A_ROW, BadNumbers, Guard, first_not_finite
from tests.checkpoints import manager_at
from tests.test_cli import phalanx

TASK = '''
from dataclasses import dataclass
import torch
from torch import nn
import phalanx
from phalanx.data.order import Order


@dataclass
class Spoilt(phalanx.Task):
    """One sample of step 33 is not what it should be."""

    global_batch: int = 24
    steps: int = 50
    value: float = float("nan")

    def model(self):
        return nn.Linear(8, 3)

    def data(self):
        made = torch.Generator().manual_seed(1)
        x = torch.randn(2000, 8, generator=made)
        x[Order(2000, 24, 0).ids(32)[5]] = self.value
        return phalanx.data.Arrays(x=x, y=torch.randint(0, 3, (2000,), generator=made))

    def inputs(self, batch):
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.cross_entropy(output, batch["y"])
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "spoilt.py").write_text(TASK)
    return tmp_path


def test_what_is_bad() -> None:
    guard = Guard(spike=3.0)
    assert guard.judge(math.nan, 1.0) == "the loss is nan"
    assert guard.judge(1.0, math.inf) == "the gradient's norm is inf"
    assert guard.judge(100.0, 1.0) == ""  # too few are known to call it a spike
    for step in range(20):
        guard.note(2.0, "", step)
    assert guard.judge(5.9, 1.0) == ""
    assert "3.5 times the median of the last 20" in guard.judge(7.0, 1.0)
    again = Guard(spike=3.0)
    again.restore(guard.state())
    assert again.judge(7.0, 1.0) == guard.judge(7.0, 1.0)


def test_many_bad_steps_in_a_row_are_no_accident() -> None:
    guard = Guard()
    for step in range(IN_A_ROW - 1):
        guard.note(math.nan, "the loss is nan", step)
    with pytest.raises(BadNumbers, match=f"as were {IN_A_ROW - 1} steps before it"):
        guard.note(math.nan, "the loss is nan", IN_A_ROW - 1)
    with pytest.raises(BadNumbers, match="step 1: the loss is nan"):
        Guard("stop").note(math.nan, "the loss is nan", 0)


@pytest.mark.parametrize(("words", "reason"), [(("ignore", 0.0), "--bad ignore"), (("skip", 0.5), "--spike 0.5")])
def test_settings_that_mean_nothing(words: tuple[str, float], reason: str) -> None:
    with pytest.raises(WrongUse, match=reason):
        Guard(*words)


def test_a_bad_step_is_skipped_with_its_samples_noted(folder: Path) -> None:
    done = phalanx("train", "spoilt.py", "--on", "local:2", "--run", "one", cwd=folder)
    assert done.returncode == 0, done.stderr
    run = Run(folder / "one")
    (bad,) = [event for event in run.events(0) if event["kind"] == "bad"]
    assert bad["step"] == 32
    assert len(bad["sample_ids"]) == 24
    assert "step 33: the loss is nan; its update was left out" in done.stdout
    assert [step for step, event in run.ledger().items() if event["skipped"]] == [32]


@pytest.mark.parametrize("value", ["nan", "10000"])
def test_a_rollback_leaves_out_the_data_since_the_last_kept_state(folder: Path, value: str) -> None:
    done = phalanx(
        "train", "spoilt.py", "--layout", "fsdp=2", "--bad", "rollback", "--spike", "4", "--set", f"value={value}",
        "--run", "one", cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    run = Run(folder / "one")
    assert "back to step 30, and its data up to the bad step is left out" in done.stdout
    assert "3 steps' data left out" in done.stdout
    kinds = {step: event["kind"] for step, event in run.ledger().items()}
    assert [step for step, kind in kinds.items() if kind == "left out"] == [30, 31, 32]
    assert len(kinds) == 50


def test_a_run_may_end_at_the_first(folder: Path) -> None:
    done = phalanx("train", "spoilt.py", "--on", "local:2", "--bad", "stop", "--run", "one", cwd=folder)
    assert done.returncode == 1
    assert "step 33: the loss is nan" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "one" / "final").exists()


def test_which_tensor_is_not_finite() -> None:
    large = torch.full((9,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert first_not_finite([("a", torch.ones(3)), ("large", large), ("half", torch.full((9,), 6e4).half())]) == ""
    for value in (math.nan, math.inf, -math.inf):
        assert first_not_finite([("a", torch.ones(3)), ("b", torch.tensor([1.0, value]).bfloat16())]) == "b"
    assert first_not_finite([("opposite", torch.tensor([math.inf, -math.inf]))]) == "opposite"


@pytest.mark.parametrize("rate", ["1e38", "1e39"], ids=["finite and useless", "not finite"])
def test_weights_that_lead_nowhere_are_not_certified_and_cost_no_good_checkpoint(folder: Path, rate: str) -> None:
    words = ["spoilt.py", "--set", "value=0", "--set", "warmup_steps=0", "--run", "one", "--save-steps", "2"]
    words += ["--keep", "1"]
    assert phalanx("train", *words, "--steps", "4", cwd=folder).returncode == 0
    good = manager_at(folder / "one" / "checkpoints").steps()[-1]
    words += ["--resume", "--on", "local:2", "--set", f"learning_rate={rate}"]
    done = phalanx("train", *words, "--steps", "15", cwd=folder)
    assert done.returncode == 1, done.stdout
    assert "Traceback" not in done.stderr
    if rate == "1e39":
        assert "weight is not finite after step 15, so nothing was saved. Lower the learning rate" in done.stderr
        assert f"from step {max(manager_at(folder / 'one' / 'checkpoints').steps())} in one/checkpoints" in done.stderr
        words = ["spoilt.py", "--set", "value=0", "--set", "warmup_steps=0", "--set", f"learning_rate={rate}"]
        alone = phalanx("train", *words, "--run", "two", "--steps", "3", cwd=folder)
        assert alone.returncode == 1
        assert "from step 0: there is no checkpoint in two/checkpoints" in alone.stderr
    else:
        assert "the update of step 15 was left out (the loss is inf), and those of 9 before it" in done.stderr
    assert not (folder / "one" / "final" / "certificate.json").exists()
    assert good == 4
    assert good in manager_at(folder / "one" / "checkpoints").steps()
