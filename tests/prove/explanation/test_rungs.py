"""Every rung is explained: by a method of an inquiry, or by a file of its own."""

from __future__ import annotations

import pytest

from phalanx.prove.explanation import explain
from phalanx.prove.explanation.rungs import EXPLANATIONS, explains
from phalanx.prove.explanation.sites import location
from phalanx.prove.ladder import RESUMING, RUNGS

ELSEWHERE = {"running", "evaluation", "agreement of ranks", *RESUMING}
"""Of runs that stop, of evaluations, of interruptions; and ranks that disagree, which says all there is."""


def test_every_rung_has_an_explanation() -> None:
    assert set(RUNGS) - set(EXPLANATIONS) == ELSEWHERE


def test_explanations_are_methods_of_an_inquiry_and_name_code_that_is_there() -> None:
    for rung, explanation in EXPLANATIONS.items():
        name = explanation.method.__name__
        assert getattr(explain.Inquiry, name) is explanation.method
        assert explanation.at is None or location(explanation.at), rung


def test_what_is_not_on_the_ladder_is_refused() -> None:
    with pytest.raises(AssertionError, match="not on the ladder"):
        explains("speed")
