"""TensorBoard, read back by its own reader."""

from __future__ import annotations

import pytest

from phalanx.run import Run
from tests.watch.loggers.runs import STEPS, losses

pytest.importorskip("tensorboard", reason="tensorboard is not installed (the dev extra has it)")


def test_its_reader_finds_each_step_once(run: Run) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run.path / "logs" / "tensorboard"))
    found.Reload()
    tags = found.Tags()["scalars"]
    assert {"train/loss", "train/loss/right", "train/accuracy", "train/lr", "train/grad_norm", "held_out/loss"} <= set(
        tags
    )
    steps = found.Scalars("train/loss")
    assert [event.step for event in steps] == list(range(1, STEPS + 1))
    assert [event.value for event in steps] == pytest.approx(losses(run), rel=1e-6)
    assert [event.step for event in found.Scalars("held_out/accuracy")] == [5, 10, STEPS]
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= found.summary_metadata.keys()
    (text,) = found.Tensors("settings/text_summary")
    shown = text.tensor_proto.string_val[0].decode()
    assert "| global_batch | 8 |" in shown
    assert "topsecret" not in shown
