"""``phalanx doctor --on`` a place: the same hosts that a run would have examine each other, as a job of that place."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import WrongUse
from phalanx.launch.place import Command, Place, words_of
from phalanx.launch.stopping import GRACE
from phalanx.run import Run
from phalanx.verdict import Verdict


def doctor_elsewhere(given: Mapping[str, Any], place: Place) -> Verdict:
    """Nothing is left of it, but where its job goes on unseen."""
    if given["run"] is not None and given["run"].exists() and any(given["run"].iterdir()):
        raise WrongUse(f"{given['run']} is not empty. Give a new folder that all hosts see, or leave --run out.")
    device = given["device"] or ("cuda" if place.gpus else "cpu")
    words = words_of({**given, "device": device}, left_out=("on", "run", "task"))
    run = Run.create(given["run"], "doctor")
    command = Command(sys.executable, words, Path.cwd(), run.path.resolve(), run.path.name, GRACE, verb="doctor")
    try:
        verdict = place.train(command, lambda: None)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    if verdict.exit_code == 130:
        return verdict
    shutil.rmtree(run.path, ignore_errors=True)
    if verdict.holds:
        return Verdict(True, f"{place.text} is fit to train on")
    again = f"Mend what is said above, then phalanx doctor --on {place.text}"
    return Verdict(False, verdict.summary, next=again, code=verdict.exit_code)
