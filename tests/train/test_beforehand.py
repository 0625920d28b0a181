"""What a task wants to know of every sample before the first step: the same however it is spread, and kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import phalanx
from phalanx import CannotHere, Layout, Run, WrongUse
from phalanx.train.beforehand import FILE, join_beforehand
from tests.ranks import Ranks
from tests.test_cli import phalanx as command


class Points:
    def __init__(self, size: int, shift: float = 0.0) -> None:
        self.size, self.shift = size, shift

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.linspace(-1, 1, 6).roll(index) + self.shift, "place": torch.tensor(index)}


@dataclass
class FromWhereItBegan(phalanx.Task):
    """Learns to be other than it was."""

    global_batch: int = 5
    steps: int = 3
    shift: float = 0.0
    silent: bool = False

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def data(self) -> Points:
        return Points(13, self.shift)

    def held_out(self) -> Points:
        return Points(7, 0.5)

    def inputs(self, batch: dict[str, Any]) -> Tensor:
        found: Tensor = batch["x"]
        return found

    def beforehand(self) -> Callable[[Any, dict[str, Any]], Mapping[str, Tensor]]:
        return lambda output, batch: {} if self.silent else {"began": output, "square": output[:, 0].square()}

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        apart = output - batch["began"] - 1 if "began" in batch else output
        return phalanx.Loss(apart.square().sum(), len(output))


def known(layout: str = "dp=1", run: Run | None = None, **settings: Any) -> tuple[Tensor, Tensor, list[float]]:
    """Of the samples that are trained on, and of the others; and the losses."""
    with phalanx.Engine(FromWhereItBegan(**settings), Layout.parse(layout), device="cpu", run=run) as engine:
        assert engine.held_out is not None
        rows = [
            torch.stack([loader.reader.data[index]["began"] for index in range(loader.order.size)])
            for loader in (engine.loader, engine.held_out)
        ]
        losses = [engine.step(batch).loss for batch in engine.batches()]
        assert engine.evaluate()["loss"] < 2
    return rows[0], rows[1], losses


def test_every_sample_knows_what_the_model_gave_of_it_first(ranks: Ranks) -> None:
    expected = known()
    task = FromWhereItBegan()
    with phalanx.Engine(task, device="cpu") as engine, torch.no_grad():
        own = engine.model(torch.stack([task.data()[index]["x"] for index in range(13)]))
    assert torch.allclose(expected[0], own, atol=1e-6)
    assert expected[2][0] == pytest.approx(2.0, abs=1e-6)
    assert expected[2][2] < expected[2][0]
    for layout in ("dp=3", "fsdp=3,zero=3", "dp=3,micro_batch=1"):
        for found in ranks(3, known, layout):
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[:2], expected[:2], strict=True))
            assert found[2] == pytest.approx(expected[2], abs=1e-6)


def test_it_is_kept_with_the_run_and_taken_up_again(tmp_path: Path) -> None:
    run = Run(tmp_path)
    before = known(run=run)[0]
    path = tmp_path / FILE
    with safe_open(path, "pt") as file:
        said = file.metadata()
    tensors = load_file(path)
    assert sorted(tensors) == ["data/began", "data/square", "held_out/began", "held_out/square"]
    tensors["data/began"] += 1
    save_file(tensors, path, said)
    assert torch.equal(known(run=run)[0], before + 1), "it was computed again"
    with pytest.raises(CannotHere, match=r"is of other settings or samples than the run has now"):
        known(run=run, shift=0.1)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(CannotHere, match=r"cannot be read .* Remove it, and it is computed again"):
        known(run=run)
    path.unlink()
    assert torch.equal(known(run=run)[0], before)


def signs(layout: str) -> int:
    with phalanx.Engine(FromWhereItBegan(), Layout.parse(layout), device="cpu") as engine:
        before = engine.traffic.signs[0]
        join_beforehand(engine)
        return engine.traffic.signs[0] - before


def test_a_supervisor_sees_that_it_goes_on(ranks: Ranks) -> None:
    batches = 3 + 2
    assert signs("dp=1") >= batches
    assert min(ranks(2, signs, "dp=2")) >= batches


def test_joining_it_twice_is_joining_it_once() -> None:
    with phalanx.Engine(FromWhereItBegan(), device="cpu") as engine:
        first = engine.loader.reader.data[3]
        join_beforehand(engine)
        assert torch.equal(engine.loader.reader.data[3]["began"], first["began"])


def test_a_function_that_gives_nothing_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"FromWhereItBegan\.beforehand gives a function that returns nothing"):
        known(silent=True)


def test_ranks_that_start_again_read_it(tmp_path: Path) -> None:
    shutil.copy(__file__, tmp_path / "task.py")
    done = command(
        "train", "task.py:FromWhereItBegan", "--layout", "dp=2", "--on", "local:2", "--steps", "6", "--kill", "1@3",
        "--run", "out", "--set", "warmup_steps=0", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("nothing is computed again") == 1, done.stdout
    assert (tmp_path / "out" / FILE).is_file()
    losses = {event["step"]: event["loss"] for event in Run(tmp_path / "out").events(0, "step")}
    assert losses[0] == pytest.approx(2.0, abs=1e-5)
    assert losses[5] < losses[0]


def test_samples_without_it_are_not_evaluated() -> None:
    with phalanx.Engine(FromWhereItBegan(), device="cpu") as engine:
        engine.held_out = engine.in_order(engine.task.data(), "data")
        with pytest.raises(WrongUse, match=r"do not have what FromWhereItBegan\.beforehand gives"):
            engine.evaluate()
