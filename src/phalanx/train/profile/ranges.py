"""Phases of a step and collectives by axis as named ranges: torch's profiler shows them, and Nsight on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor
from torch.profiler import record_function

from phalanx.callbacks import Callback
from phalanx.words import in_bytes

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.step import Metrics


class Ranges(Callback):
    """While it is entered, what an engine does has names. A step's begins with its first phase."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._cuda = engine.device.type == "cuda"
        self._step, self._phase = ExitStack(), ExitStack()
        self._stepping = False
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        clock, traffic = self.engine.clock, self.engine.traffic
        watched: list[tuple[list[Any], Any]] = [
            (clock.watchers, self.begin),
            (traffic.watchers, self._launched),
            (traffic.wait_watchers, self._waiting),
        ]
        for watchers, own in watched:
            watchers.append(own)
            self._undo.callback(watchers.remove, own)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self.end_step()

    def begin(self, phase: str) -> None:
        """A phase begins, and the one before is over; "": nothing begins."""
        self._phase.close()
        if phase:
            if not self._stepping:
                self._stepping = True
                self._step.enter_context(self.range(f"step {self.engine.step_number + 1}"))
            self._phase.enter_context(self.range(f"phase: {phase}"))

    def on_step(self, engine: Engine, metrics: Metrics) -> None:
        self.end_step()

    def end_step(self) -> None:
        self._phase.close()
        self._step.close()
        self._stepping = False

    def _launched(self, axis: str, kind: str, tensor: Tensor) -> None:
        with self.range(f"launch: {axis} {kind}, {in_bytes(tensor.numel() * tensor.element_size())}"):
            pass

    @contextmanager
    def _waiting(self, axis: str, kind: str) -> Iterator[None]:
        with self.range(f"wait: {axis} {kind}"):
            yield

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """One of them."""
        if self._cuda:
            torch.cuda.nvtx.range_push(name)
        try:
            with record_function(name):
                yield
        finally:
            if self._cuda:
                torch.cuda.nvtx.range_pop()
