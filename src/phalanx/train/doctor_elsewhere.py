"""``phalanx doctor --on`` a place, or ``probe``: the hosts that a run would have examine each other, as a job there."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from phalanx.errors import CannotHere, WrongUse
from phalanx.launch.place import ENDED, Command, Place, noted, words_of
from phalanx.launch.stopping import GRACE
from phalanx.run import Run
from phalanx.verdict import Verdict


def doctor_elsewhere(given: Mapping[str, Any], place: Place) -> Verdict:
    """Nothing is left of it here, but where its job goes on unseen."""
    if given["run"] is not None and given["run"].exists() and any(given["run"].iterdir()):
        raise WrongUse(f"{given['run']} is not empty. Give a new folder that all hosts see, or leave --run out.")
    device = given["device"] or ("cuda" if place.gpus else "cpu")
    words = words_of({**given, "device": device}, left_out=("on", "run", "task"))
    verb: str = given["task"]
    run = Run.create(given["run"], verb)
    command = Command(sys.executable, words, Path.cwd(), run.path.resolve(), run.path.name, GRACE, verb=verb)
    try:
        verdict = place.train(command, lambda: None)
    except BaseException:
        _cleared(run)
        raise
    if not _cleared(run):
        return verdict
    if verdict.holds:
        return Verdict(True, f"{place.text} is {'fit to train on' if verb == 'doctor' else 'measured'}")
    if verdict.exit_code == 130:
        return Verdict(False, "stopped: nothing was concluded", code=130)
    again = f"Mend what is said above, then phalanx {verb} --on {place.text}"
    return Verdict(False, verdict.summary, next=again, code=verdict.exit_code)


def _cleared(run: Run) -> bool:
    """Take its job and its folder away, if it is over; whether it is."""
    with suppress(CannotHere):
        submitted = noted(run)
        if submitted is not None:
            place, job = submitted
            if place.status(run, job).state != ENDED:
                return False
            with suppress(CannotHere):  # most places have nothing left of a job that is over
                place.cancel(run, job)
        shutil.rmtree(run.path, ignore_errors=True)
        return True
    return False
