"""What is an event: fields of the right types, and all that its kind has."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phalanx.event_fields import is_event

STEP: dict[str, Any] = {
    "kind": "step", "time": 1.7e9, "step": 3, "loss": 1.5, "losses": {}, "logged": {"accuracy": "nan"},
    "grad_norm": "inf", "seconds": {"forward": 0.1}, "sent": {"dp": 10}, "skipped": False, "bad": "", "turn": "",
    "signals": [], "samples": "12 ab", "memory_weights": 10, "exposed_dp": 0.1, "other_seconds": 0.0, "lr": 0.1,
}  # fmt: skip


def test_steps_as_they_are_written() -> None:
    assert is_event(STEP)
    assert is_event(json.loads(json.dumps(STEP)))
    assert is_event({"kind": "start", "time": 1.0, "rank": 0, "source": None, "changes": ["a"], "order": {"a": [1]}})
    assert is_event({"kind": "of a callback's", "anything": [1, {"a": None}]})
    assert is_event({"kind": "stopped", "held_out": None})
    assert is_event({"kind": "checkpoint", "step": 3, "seconds": 1.5})


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": []}, {"kind": None}, {"time": "now"}, {"time": -1}, {"time": 1e12}, {"time": float("nan")},
        {"step": "3"}, {"step": -1}, {"step": 1.5}, {"step": True}, {"step": 1 << 60}, {"step": None},
        {"loss": "high"}, {"loss": [1]}, {"losses": [1]}, {"losses": {"a": []}}, {"logged": {"a": "b"}},
        {"seconds": 1.0}, {"seconds": {"a": "nan"}}, {"seconds": {"a": 10**400}}, {"sent": {"a": None}},
        {"turn": 3}, {"samples": {}}, {"memory_x": "1"}, {"exposed_dp": []}, {"other_seconds": {}}, {"of": -1},
        {"rank": 1 << 40}, {"generation": "1"}, {"x": [[[[[[1]]]]]]}, {"x": {"a": {"a": {"a": {"a": {"a": 1}}}}}},
    ],
)  # fmt: skip
def test_a_field_of_another_type(wrong: dict[str, Any]) -> None:
    assert not is_event(STEP | wrong)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("step", {}), ("checkpoint", {}), ("evaluation", {"step": 1}), ("bad", {"step": 1}), ("replay", {}),
        ("corrupted", {"step": 1, "ranks": [0]}), ("pause", {"step": 1}), ("dead gradients", {"step": 1}),
        ("evaluation", {"step": 1, "held_out": None}), ("corrupted", {"step": 1, "ranks": ["a"], "reason": ""}),
        ("checkpoint", {"step": 1, "seconds": {"a": 1}}),
    ],
)  # fmt: skip
def test_a_field_that_its_kind_has_is_missing_or_another(kind: str, fields: dict[str, Any]) -> None:
    assert not is_event({"kind": kind, "time": 1.0, **fields})
