"""Time and FLOPs by module: FLOPs in one step, times in the next, so that counting does not slow what is timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from phalanx.callbacks import Callback
from phalanx.events import say
from phalanx.files import write_whole
from phalanx.folder_files import make_folder
from phalanx.run import Run
from phalanx.train.profile.flops import FlopCount
from phalanx.train.profile.module_hooks import BACKWARD, FORWARD, ModuleHooks
from phalanx.train.profile.request import ProfileRequest
from phalanx.watch.module_table import module_part_path

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.step import Metrics

COMPILED = (
    "FLOPs are not counted with compile=blocks, whose products are inside compiled code, and modules inside of blocks "
    "are not seen. Leave compile out for a profile of them"
)


@dataclass(eq=False)
class ModuleRecorder(Callback):
    """On every rank, for all of them."""

    request: ProfileRequest
    run: Run
    said: Callable[[str], None]
    """Told how it goes, on rank 0."""
    _hooks: ModuleHooks | None = field(default=None, init=False)
    _counter: FlopCount | None = field(default=None, init=False)
    _counted: ModuleHooks | None = field(default=None, init=False)
    _undo: ExitStack = field(default_factory=ExitStack, init=False)

    def on_start(self, engine: Engine) -> None:
        self._consider(engine)

    def on_step(self, engine: Engine, metrics: Metrics) -> None:
        """The next step may be one to count, or to time."""
        if self._hooks is not None:
            hooks, self._hooks = self._hooks, None
            self._undo.close()
            if engine.step_number == self.request.first:
                self._write(engine, hooks)
            else:
                self._counted = hooks
        self._consider(engine)

    def _consider(self, engine: Engine) -> None:
        coming = engine.step_number + 1
        if coming == self.request.first:
            self._hook(engine, count=False)
        elif coming == self.request.first - 1 and engine.layout.compile == "none":
            self._hook(engine, count=True)

    def _hook(self, engine: Engine, count: bool) -> None:
        hooks = ModuleHooks(seen_modules(engine), engine.device.type == "cuda")
        self._hooks, self._undo = hooks, ExitStack()
        self._undo.enter_context(hooks)
        entered = False

        def phase(name: str) -> None:
            nonlocal entered
            hooks.phase(name)
            if count and name == FORWARD and not entered:  # a step has begun: samples are fetched before
                entered = True
                self._counter = FlopCount(hooks.counted)
                self._undo.enter_context(self._counter)

        engine.clock.watchers.append(phase)
        self._undo.callback(engine.clock.watchers.remove, phase)

    def _write(self, engine: Engine, hooks: ModuleHooks) -> None:
        path = module_part_path(self.run.path, engine.rank)
        if self._counted is None and path.exists():
            return  # of a start before this one, which had counted
        if engine.device.type == "cuda":
            torch.cuda.synchronize(engine.device)  # the step is over: for its events to be
        facts = {
            "rank": engine.rank, "world": engine.world, "step": self.request.first, "layout": str(engine.layout),
            "notes": list(self._notes(engine)), "outside_flops": sum(self._flops("").values()),
            "modules": [self._row(engine, hooks, name, module) for name, module in hooks.modules],
        }  # fmt: skip
        try:
            make_folder(self.run.path, path.parent)
            write_whole(path, json.dumps(facts), within=self.run.path)
        except OSError as error:
            say(f"   note  rank {engine.rank}: {path} cannot be written: {error.strerror}; going on without")
            return
        self.said(f"profile  modules timed in step {self.request.first}; the table comes at the end of the run")

    def _row(self, engine: Engine, hooks: ModuleHooks, name: str, module: nn.Module) -> dict[str, Any]:
        own = hooks.found[name]
        flops = self._flops(name) if name else self._model_flops()
        weights = engine.spread.placement.weights
        return {
            "name": name, "kind": type(module).__name__, "calls": own.calls, "recomputed": own.recomputed,
            "forward_ms": 1000 * own.seconds(FORWARD), "backward_ms": 1000 * own.seconds(BACKWARD),
            "forward_flops": flops[FORWARD], "backward_flops": flops[BACKWARD], "output_bytes": own.output_bytes,
            "weights": sum(one.shape.numel() for n, one in weights.items() if not name or n.startswith(f"{name}.")),
        }  # fmt: skip

    def _flops(self, name: str) -> dict[str, int]:
        if self._counted is None:
            return {FORWARD: 0, BACKWARD: 0}
        return self._counted.found[name].flops if name else self._counted.outside.flops

    def _model_flops(self) -> dict[str, int]:
        return {FORWARD: 0, BACKWARD: 0} if self._counted is None else self._counted.found[""].flops

    def _notes(self, engine: Engine) -> Iterator[str]:
        if engine.layout.compile == "blocks":
            yield COMPILED
        elif self._counted is None:
            yield "FLOPs were not counted: the run began or went on with this very step, and they are in the one before"
        for name in sorted(self._counter.uncounted if self._counter is not None else ()):
            yield f"FLOPs of {name} could not be counted"
        if engine.layout.schedule == "zb" and engine.layout.pp > 1:
            yield "with schedule=zb the gradients of weights are computed later, and are in no module's backward"

    def finish(self, engine: Engine) -> None:
        """The run is over before that step, or it is done."""
        self.stop()

    def stop(self) -> None:
        self._undo.close()
        self._hooks = None


def seen_modules(engine: Engine) -> list[tuple[str, nn.Module]]:
    """All of the model, but for those inside of compiled code."""
    inside = tuple(f"{block}." for block in engine.anatomy.blocks) if engine.layout.compile == "blocks" else ()
    return [(name, module) for name, module in engine.model.named_modules() if not name.startswith(inside or ("\0",))]
