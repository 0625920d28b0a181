"""At the end of a run: what ranks have left of a profile, put together and said."""

from __future__ import annotations

from phalanx.events import say
from phalanx.run import Run
from phalanx.train.options import Options
from phalanx.watch.module_table import conclude_modules
from phalanx.watch.trace_summary import conclude
from phalanx.words import many


def tell_profile(options: Options, run: Run, done: int) -> None:
    """``done``: how many steps the run has come to."""
    request = options.profiled()
    if request is None or request.kind == "nvtx":
        return
    try:
        text = conclude_modules(run.path) if request.kind == "modules" else conclude(run.path, request.name)
    except OSError as error:
        say(f"   note  the profile cannot be put together: {error.strerror or error}; it is in {run.path / 'profile'}")
        return
    if text is not None:
        say(f"\n{text}")
        return
    path = run.path / "profile" / f"{request.name}.txt"
    if path.exists():
        say(f"profile  {request.told} had been profiled before this start: {path}")
    elif done < request.first:
        say(f"profile  nothing was profiled: the run ended after {many(done, 'step')}, before step {request.first}")
    else:
        say(f"profile  nothing was profiled: {request.told} came before this start, or could not be recorded")
