"""Verdicts: words for people, JSON for programs, a code for scripts."""

from __future__ import annotations

import json

from phalanx import Verdict


def test_a_verdict_speaks_three_ways() -> None:
    verdict = Verdict(False, "it does not hold", ["because"], next="do this")
    assert str(verdict) == "it does not hold\nbecause\ndo this"
    assert json.loads(verdict.to_json())["code"] == verdict.exit_code == 1
    assert Verdict(True, "fine").exit_code == 0
    assert Verdict(False, "wrong use", code=2).exit_code == 2
