"""A rank's engine with what ``--profile`` asks for attached to it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from phalanx.run import Run
from phalanx.train.options import Options
from phalanx.train.profile.modules import ModuleRecorder
from phalanx.train.profile.ranges import Ranges
from phalanx.train.profile.recorder import StepRecorder

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


@contextmanager
def profiled(
    options: Options, engine: Engine, run: Run, generation: int,
    may_take_long: Callable[[], None], said: Callable[[str], None],
) -> Iterator[None]:  # fmt: skip
    """Meanwhile; where it ends well, what was recorded until then is written."""
    request = options.profiled()
    if request is None:
        yield
        return
    if request.kind == "nvtx":
        with Ranges(engine) as ranges:
            engine.callbacks.add(ranges)
            yield
        return
    recorder: StepRecorder | ModuleRecorder
    if request.kind == "modules":
        recorder = ModuleRecorder(request, run, said)
    else:
        host = options.host or socket.gethostname()
        recorder = StepRecorder(request, run, host, generation, may_take_long, said)
    engine.callbacks.add(recorder)
    try:
        yield
    except BaseException:
        recorder.stop()
        raise
    recorder.finish(engine)
