"""What the results of layouts come to together."""

from __future__ import annotations

from phalanx.prove.explanation.finding import Finding
from phalanx.prove.results import DIFFERS, EQUAL, NOT_APPLICABLE, Result, concluded


def test_one_layout_that_differs_is_enough() -> None:
    finding = Finding("loss", "count", 0, 0.5, [1], ["dp"], next="Mend it.")
    verdict = concluded("Digits", [Result("dp=1", EQUAL), Result("dp=2", DIFFERS, finding=finding)])
    assert not verdict.holds
    assert verdict.exit_code == 1
    assert "under 1 of 2 layouts" in verdict.summary
    assert verdict.next == "Mend it."


def test_what_is_not_applicable_proves_nothing() -> None:
    refused = Result("tp=8", NOT_APPLICABLE, "4 heads do not divide by 8")
    verdict = concluded("Digits", [refused])
    assert verdict.exit_code == 2
    assert verdict.evidence == ["tp=8: 4 heads do not divide by 8"]
    verdict = concluded("Digits", [refused, Result("dp=2", EQUAL)])
    assert verdict.holds
    assert verdict.summary == "Digits trains like one device under 1 layout; 1 not applicable"
