"""A run is interrupted, saved and resumed; what is lost on the way is found."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import phalanx
from phalanx import Engine, Layout
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.slot import Slot
from phalanx.checkpoint.state import State
from phalanx.checkpoint.store import Folder
from phalanx.prove.ladder import Standard
from phalanx.prove.proof import prove
from phalanx.prove.ranks.resuming import emptied, write_reference
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.prove.reference.loop import Reference
from phalanx.recipes.gpt import GPT
from tests.prove import tasks
from tests.tasks import Digits


def test_an_emptied_engine_has_one_devices_state_again(tmp_path: Path) -> None:
    task = hostile(tasks.Normed(), Trial(3))
    standard = Standard.measured(Reference(task).run(), [])
    write_reference(task, standard, str(tmp_path))
    checkpoint = CheckpointManager(Folder(tmp_path)).open(2)
    with Engine(task, Layout(), device="cpu") as engine:
        engine.step(next(engine.batches()))
        assert engine.optimizer.state
        emptied(engine)
        assert not engine.optimizer.state
        assert (engine.step_number, engine.samples, engine.terms) == (0, 0, 0.0)
        weights = engine.whole_weights()
        assert all(bool(w.isnan().all()) for w in weights.values() if w.is_floating_point())
        checkpoint.read(State(engine.spread, engine.optimizer).wanted(checkpoint.manifest))
        engine.resume(checkpoint.manifest.facts)
        want = standard.steps[1].weights | standard.steps[1].buffers
        for name, weight in engine.whole_weights().items():
            assert torch.equal(weight, want[name]), name
        assert engine.step_number == 2
        assert next(engine.batches()).samples == standard.steps[2].samples


@dataclass
class PartlyFrozen(Digits):
    precision: phalanx.task.Precision = "bf16"

    def model(self) -> nn.Module:
        model = super().model()
        next(model.parameters()).requires_grad_(False)
        return model


def test_emptying_frozen_weights_is_no_write_of_the_models() -> None:
    with Engine(PartlyFrozen(), Layout(), device="cpu") as engine:
        assert any(weight.apart and not weight.trainable for weight in engine.spread.weights.values())
        engine.step(next(engine.batches()))
        emptied(engine)
        engine.spread.updated()


def test_what_no_checkpoint_has_is_found() -> None:
    finding = prove(tasks.Forgets(), ["dp=2"]).results[0].finding
    assert finding is not None
    assert finding.rung == "resume"
    assert not finding.axes
    assert "without an interruption this layout trains like one device" in finding.cause
    assert "engine.py" in finding.where


def test_the_layout_before_is_taken_up() -> None:
    proof = prove(GPT(), ["dp=2", "tp=2"], inject="tp_parts_in_an_order_of_their_own")
    assert [result.verdict for result in proof.results] == ["equal", "differs"]
    finding = proof.results[1].finding
    assert finding is not None
    assert finding.rung == "resume elsewhere"
    assert "what dp=2" in finding.cause
    places = [f"has the part of rank {1 - rank} of tp where that of rank {rank} belongs" for rank in (0, 1)]
    assert any(place in finding.cause for place in places)
    assert "state.py" in finding.where


def test_a_trial_of_one_step_is_resumed_too() -> None:
    assert prove(tasks.Plain(), ["dp=2", "fsdp=2"], steps=1).holds
    finding = prove(GPT(), ["fsdp=2"], steps=1, inject="moments_not_restored").results[0].finding
    assert finding is not None
    assert finding.rung == "resume"


def test_a_rank_that_keeps_nothing_has_a_slot_all_the_same() -> None:
    slot = Slot()
    for step in (1, 2):
        assert slot.lay_out([]) == []
        slot.seal({"step": step}, {})
        assert (slot.step(), slot.staged().tensors) == (step, [])
    slot.close()
