"""A bug says what it is, what it takes, and what should be found."""

from __future__ import annotations

import pytest

from phalanx.layout import Layout
from phalanx.prove.bugs import planting
from phalanx.prove.bugs.known import BUGS
from phalanx.prove.bugs.planting import Bug, bug
from phalanx.prove.bugs.seams import Replace


def test_every_bug_says_what_it_does() -> None:
    assert len({bug.row for bug in BUGS.values()}) >= 35
    for known in BUGS.values():
        assert known.words.endswith("."), known.name
        assert known.place
        assert Layout.parse(known.layout).world > 1


def test_a_bug_is_listed_under_the_name_of_its_function(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: dict[str, Bug] = {}
    monkeypatch.setattr(planting, "BUGS", listed)

    @bug(7, "tp=2", "norm", "tp", 2.0, experts=8)
    def twice(replace: Replace) -> None:
        """Counts
        twice."""

    made = listed["twice"]
    assert (made.row, made.layout, made.factor, made.settings) == (7, "tp=2", 2.0, {"experts": 8})
    assert made.words == "Counts twice."
