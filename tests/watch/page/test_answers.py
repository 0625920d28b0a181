"""What the page is answered while a run is read, and what is found once for all who ask."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from phalanx.watch.page import reading
from phalanx.watch.page.answers import KeptAnswer, NotThere, RunPages
from tests.watch.page.folders import write


def asked(pages: RunPages, what: str, **query: str) -> dict:
    return json.loads(pages.answer(f"/api/{what}", {"run": "run", **query})[0])


def test_a_long_run_is_shown_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write(tmp_path / "run", 4, 40)
    pages = RunPages(lambda: {"run": run})
    pages.prepare()
    assert asked(pages, "run")["reading"] is False, "it is short"
    monkeypatch.setattr(reading, "MUCH", 1)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    pages = RunPages(lambda: {"run": run})
    pages.prepare()
    seen = [asked(pages, "run")]
    assert seen[0]["steps"] == 40, "the first rank's are waited for"
    assert asked(pages, "verdict")["summary"]
    while seen[-1]["reading"]:
        seen.append(asked(pages, "run"))
    assert (seen[-1]["ranks"], seen[-1]["of_ranks"], seen[-1]["steps"]) == (4, 4, 40)
    assert asked(pages, "charts")["steps"] == list(range(40))
    deadline = time.monotonic() + 30
    while "pending" in (said := asked(pages, "verdict")):
        assert said["summary"].startswith("ended: 40 steps of 40 done")
        assert time.monotonic() < deadline
    assert said["summary"].startswith("died: its supervisor ended")
    opening = pages._run("run").opening
    assert opening is not None
    opening.join()


def test_every_answer(tmp_path: Path) -> None:
    run = write(tmp_path / "run", 2, 30)
    pages = RunPages(lambda: {"run": run})
    assert asked(pages, "run")["unheard"] == ""
    assert asked(pages, "heat")["phase"] == "own"
    assert asked(pages, "memory", rank="1")["parts"] == {}
    assert asked(pages, "links")["axes"] == {}
    assert len(asked(pages, "spans")["rows"]) == 2
    for what in ("nothing", "../run", "run/"):
        with pytest.raises(NotThere):
            asked(pages, what)
    with pytest.raises(NotThere, match="no run 'other' is watched here"):
        asked(pages, "run", run="other")


def test_what_takes_a_while_is_found_once() -> None:
    kept, found = KeptAnswer(), []

    def find() -> int:
        found.append(1)
        time.sleep(0.05)
        return len(found)

    others = [threading.Thread(target=kept.get, args=(find,)) for _ in range(5)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    assert kept.get(find) == len(found) == 1
    kept.until = 0.0
    assert kept.get(find) == 2
