"""What is told of a run beside its numbers: how it stands, its settings, what it survived, certificate and proof."""

from __future__ import annotations

import json
import math
import shlex
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import WrongUse
from phalanx.files import exists
from phalanx.folder_files import left_out, note, read_object
from phalanx.run import MOST_PROOF, Run, holder, summary
from phalanx.verdict import Verdict
from phalanx.watch.page.links import hosts
from phalanx.watch.page.table import RunTable
from phalanx.watch.why import why
from phalanx.words import many

MOST_KINDS = 100
"""So many kinds of events are counted, those that there are most of."""
MOST_MARKS = 200
"""So many marks of a kind are drawn, the newest; how many there are is said."""
MARKED = {
    "checkpoint": "saved", "failure": "failed", "rollback": "rolled back", "bad": "bad number",
    "corrupted": "ranks disagreed", "damaged": "a checkpoint was damaged", "left out": "left out",
}  # fmt: skip
"""Events that charts have a mark for, with what it says."""
FROM_ZERO = ("bad", "left out")
"""Events that name a step as it is counted from 0; others say how many were done."""
RECENT_SECONDS = 60.0
"""A run that noted something so lately goes on, whoever holds its folder."""


def verdict(run: Run) -> dict[str, Any]:
    """What stands on top of the page."""
    try:
        found: Verdict = why(run)
    except Exception as error:  # a page that shows the rest is worth more than none
        now = state(run, _last_step(run).get("time", 0.0))
        found = Verdict(False, f"{now}; why it stands so could not be found", [f"{type(error).__name__}: {error}"])
    return json.loads(found.to_json())


def state(run: Run, newest: float = 0.0) -> str:
    """done, running or ended; ``newest``: when something was last noted."""
    with left_out():
        if run.certified_steps() is not None:
            return "done"
    return "running" if _held(run) or time.time() - newest < RECENT_SECONDS else "ended"


def _held(run: Run) -> bool:
    with left_out():
        return bool(holder(run.path))
    return False


def standing(run: Run, table: RunTable) -> str:
    """How it stands, in one line, by its events."""
    now = state(run, _newest(table))
    restarts = len({event.get("generation") for event in table.moments if event["kind"] == "start"}) - 1
    *_, planned = summary(_settings(run))
    of = f" of {planned:,}" if planned else ""
    times = "once" if restarts == 1 else many(restarts, "time")
    again = f", started again {times}" if restarts > 0 else ""
    last = next((event for event in reversed(table.moments) if event["kind"] == "failure"), None)
    why = f"; last failure: rank {last['rank']} {last.get('reason', '')}" if last and now == "ended" else ""
    return f"{now}: {many(table.steps, 'step')}{of} done on {many(table.ranks, 'rank')}{again}{why}"


def _newest(table: RunTable) -> float:
    ended = table.ended.values[:1]
    times = [event.get("time", 0.0) for event in table.moments[-1:]]
    return max([*times, float(ended[ended == ended].max(initial=0.0))])


def unheard(run: Run, table: RunTable) -> str:
    """That a newer start has done no step yet, where that is so: then all that is known is of what came before it."""
    starts = {
        int(event.get("generation", 0)): float(event.get("time", 0.0))
        for event in table.moments
        if event["kind"] == "start" and not event["rank"]
    }
    newest = max([run.generation(), *starts])
    ended = table.ended.values[:1]
    if not table.steps or not starts or ended[ended == ended].max(initial=0.0) > starts.get(newest, math.inf):
        return ""
    what = "has done no step yet" if _held(run) else "ended before its first step"
    return f"The newest start, generation {newest}, {what}."


def marks(table: RunTable) -> list[dict[str, Any]]:
    """Checkpoints, restarts and failures, each at a step, with its words."""
    found: dict[str, list[dict[str, Any]]] = {}
    known: set[int] = set()
    for event in table.moments:
        kind, step = event["kind"], event.get("step")
        if kind == "start":
            generation = int(event.get("generation", 0))
            if generation in known or (not known and not step):
                known.add(generation)
                continue
            known.add(generation)
            kind, words = "restart", f"went on after step {step} from {event.get('source')}, generation {generation}"
        elif kind in MARKED:
            words = ": ".join(filter(None, [MARKED[kind], str(event.get("reason") or event.get("failed") or "")]))
        else:
            continue
        at = _step_at(table, event) if step is None else int(step) + (kind in FROM_ZERO)
        own = {"step": at, "kind": kind, "words": words}
        found.setdefault(kind, []).append(own | {"rank": event["rank"], "time": event.get("time")})
    return [mark for own in found.values() for mark in own[-MOST_MARKS:]]


def _step_at(table: RunTable, event: Mapping[str, Any]) -> int:
    """The step that the first rank was in at that time."""
    ended = table.ended.values[:1]
    return int((ended < event.get("time", 0.0)).sum())


def facts(run: Run, table: RunTable, beside: Iterable[Path] = ()) -> dict[str, Any]:
    """What is true of it, for tables and for the list of runs; ``beside``: folders that its proof may lie in."""
    settings = _settings(run)
    task, layout, planned = summary(settings)
    return {
        "name": run.path.resolve().name, "state": state(run, _newest(table)), "task": task, "layout": layout,
        "planned": planned, "steps": table.steps, "ranks": table.ranks, "of_ranks": len(table.files()),
        "version": table.version, "newest": _newest(table),
        "unheard": " ".join(filter(None, [unheard(run, table), table.left_out])), "hosts": hosts(run),
        "settings": flat(settings), "certificate": _certificate(run), "proof": proof(run, beside),
        "counts": dict(Counter(event["kind"] for event in table.moments).most_common(MOST_KINDS)),
        "marks": marks(table),
        "again": f"phalanx train --config {shlex.quote(str(run.settings_path))}",
    }  # fmt: skip


def brief(run: Run) -> dict[str, Any]:
    """A run in a list of many, without reading all that it noted."""
    last, settings = _last_step(run), _settings(run)
    task, layout, planned = summary(settings)
    return {
        "name": run.path.resolve().name, "state": state(run, last.get("time", 0.0)), "task": task, "layout": layout,
        "planned": planned, "steps": last.get("step", -1) + 1, "loss": last.get("loss"),
        "newest": last.get("time", 0.0), "settings": flat(settings),
    }  # fmt: skip


def _last_step(run: Run) -> dict[str, Any]:
    with left_out():
        return run.last_step() or {}
    return {}


def flat(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Settings of all tables as words; those of the task by their own names."""
    return {
        (name if table == "settings" else f"{table}.{name}"): value
        if isinstance(value, str)
        else json.dumps(value, default=str)
        for table, values in settings.items()
        for name, value in values.items()
    }  # fmt: skip


def _settings(run: Run) -> dict[str, dict[str, Any]]:
    try:
        return run.settings() if exists(run.settings_path) else {}
    except WrongUse as error:
        note(str(error))
        return {}


def _certificate(run: Run) -> dict[str, Any] | None:
    with left_out():
        return run.certificate()
    return None


def proof(run: Run, beside: Iterable[Path] = ()) -> dict[str, Any] | None:
    """The proof in its folder, or the newest of the same code in one of the folders ``beside`` it."""
    own = _proof_in(run.path)
    if own is not None:
        return _proof(own, run.path)
    code = (_certificate(run) or {}).get("code")
    if not isinstance(code, str):
        return None
    there = ((folder / "proof.json", folder) for folder in beside if folder != run.path)
    found = [(path.stat().st_mtime, folder) for path, folder in there if path.is_file()]
    for _, folder in sorted(found, key=lambda each: -each[0]):
        other = _proof_in(folder)
        if other is not None and other.get("code") == code and not other.get("inject"):
            return _proof(other, folder)
    return None


def _proof_in(folder: Path) -> dict[str, Any] | None:
    with left_out():
        return read_object(folder, folder / "proof.json", MOST_PROOF)
    return None


def _proof(found: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    results = found.get("results")
    told = [
        {"layout": str(each.get("layout")), "verdict": str(each.get("verdict"))}
        for each in (results if isinstance(results, list) else ())
        if isinstance(each, dict)
    ]
    return {"from": folder.name, "class": found.get("class"), "code": found.get("code"), "results": told}
