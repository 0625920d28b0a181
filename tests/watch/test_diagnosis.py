"""A diagnosis, for people and for programs."""

from __future__ import annotations

import json

from phalanx.watch.diagnosis import Diagnosis


def test_it_is_a_verdict_with_its_facts() -> None:
    found = Diagnosis(
        False, "stuck: rank 1", ["rank 0 waits"], next="Look.", kind="stuck", rank=1, stacks={1: "rank 1, asleep\n"}
    )
    assert str(found) == "stuck: rank 1\nrank 0 waits\nLook.\n\nrank 1, asleep"
    told = json.loads(found.to_json())
    assert (told["kind"], told["rank"], told["code"], told["axis"], told["place"]) == ("stuck", 1, 1, None, None)
    assert told["stacks"] == {"1": "rank 1, asleep\n"}
    assert Diagnosis(True, "nothing wrong").exit_code == 0
