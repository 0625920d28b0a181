"""Copies between host and device that run beside what the device computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Copying:
    """A stream of copies in one direction. On a processor copies are done when they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None  # made when it is first needed: a fork must not inherit it

    @contextmanager
    def beside(self) -> Iterator[Callable[[], None]]:
        """Copies made in here begin when all that was asked of the device before is done, and are not waited for.

        What is given has the device wait for them before it does what is asked of it next.
        """
        if self.device.type != "cuda":
            yield lambda: None
            return
        self._stream = self._stream or torch.cuda.Stream(self.device)
        done = torch.cuda.Event()
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield lambda: torch.cuda.current_stream(self.device).wait_event(done)
            done.record(self._stream)

    def finish(self) -> None:
        """Wait until all of them are done: the host may read what they brought."""
        if self._stream is not None:
            self._stream.synchronize()
