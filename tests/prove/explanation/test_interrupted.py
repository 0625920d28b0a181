"""What an interruption changed is told with where it went wrong."""

from __future__ import annotations

import pytest

from phalanx.prove.explanation.interrupted import explain_interruption, explain_resume
from phalanx.prove.ladder import Difference
from phalanx.prove.ranks.restored import KEPT, READ, RESUMED, WRITTEN


@pytest.mark.parametrize(
    ("fault", "words", "file"),
    [
        (WRITTEN, "it was written wrongly", "checkpoint/state.py"),
        (READ, "it was read wrongly", "checkpoint/state.py"),
        (KEPT, "whose update must wait for it", "train/checkpointing.py"),
        (RESUMED, "a was not restored.", "train/engine.py"),
    ],
)
def test_where_a_saved_state_went_wrong(fault: str, words: str, file: str) -> None:
    found = [
        Difference(1, "resume", name, 0.5, rank, f"{name} was not restored", fault) for name in "ab" for rank in (0, 1)
    ]
    finding = explain_resume(found, ["fsdp"], "fsdp=2", 2, "dp=2")
    assert (finding.name, finding.ranks, finding.affected, finding.shape) == ("a", [0, 1], ["b"], fault)
    assert words in finding.cause
    assert "interrupted before step 2" in finding.cause
    assert file in finding.where


def test_another_layouts_checkpoint_is_named() -> None:
    found = [Difference(1, "resume elsewhere", "a", 0.5, 0, "a is zero", READ)]
    assert "what dp=2 saved before step 2" in explain_resume(found, ["tp"], "tp=2", 2, "dp=2").cause


def test_what_was_never_saved() -> None:
    lead = Difference(3, "samples", "hash of the global batch", 1.0, 0, "x", "y")
    finding = explain_interruption(lead, [], [], "dp=2", 2)
    assert finding.rung == "ledger"
    assert "is not in what is saved" in finding.cause
    assert "(x where one device has y)" in finding.cause
