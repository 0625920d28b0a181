"""The ground of hosts: what is wrong with one, and what differs between two, each named once with what to do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.launch.ground import Ground, flaws

GOOD = Ground("a", {"torch": "2.13", "Python": "3.11"}, 1000.0, 1 << 34, 1 << 34, 1 << 34)


def test_this_host(tmp_path: Path) -> None:
    here = Ground.here(tmp_path, gpus=True)
    assert Ground.from_words(here.to_words()) == here
    assert min(here.memory, here.disk, here.clock) > 0
    assert here.versions["torch"] in str(here)
    assert not [finding for finding in flaws([here, replace(here, host="b")]) if finding.fatal]


@pytest.mark.parametrize(
    ("other", "fatal", "told"),
    [
        ({"versions": {"torch": "2.12", "Python": "3.11"}}, True, "host b has torch 2.12 and host a 2.13. Install"),
        ({"clock": 1020.0}, False, "the clock of host b is 20 s ahead of that of host a"),
        ({"clock": 1000.0 - 86400}, True, "the clock of host b is 24.0 hours behind that of host a"),
        ({"memory": 1 << 20}, False, "host b has 1 MiB of memory left"),
        ({"disk": 0}, False, "host b has 0 B left where the run's folder is"),
        ({"shared": 64 << 20}, False, "host b has 64 MiB of shared memory left"),
        ({"ill": ["GPU 3 has 2 uncorrected memory errors."]}, True, "host b: GPU 3 has 2 uncorrected"),
    ],
)
def test_what_is_wrong_is_named(other: dict[str, object], fatal: bool, told: str) -> None:
    (found,) = flaws([GOOD, replace(GOOD, host="b", **other)])  # type: ignore[arg-type]
    assert told in found.text
    assert found.fatal == fatal
