"""Which collectives a GPU has come to. The host launches them long before, and cannot say where it is stuck."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

LOOK_SECONDS = 0.2


class Arrivals:
    """Events recorded before each collective, and looked at now and then by a thread: never waited for."""

    def __init__(
        self, event: Callable[[], Any] = torch.cuda.Event, arrived: Callable[[int], None] | None = None
    ) -> None:
        """``arrived`` is told the number of each collective that the GPU has come to."""
        self._event, self._arrived = event, arrived
        self._recorded: deque[tuple[Any, int]] = deque()
        self._spare: deque[Any] = deque()
        self._thread: threading.Thread | None = None

    def launching(self, signs: memoryview, number: int = 0) -> None:
        """A collective is launched next: counted in ``signs[0]`` once the GPU is there, in ``signs[1]`` till then."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, args=(signs,), name="arrivals", daemon=True)
            self._thread.start()
        event = self._spare.popleft() if self._spare else self._event()
        event.record()
        self._recorded.append((event, number))
        signs[1] = len(self._recorded)

    def look(self, signs: memoryview) -> None:
        """Count those that the GPU has come to."""
        while self._recorded and self._recorded[0][0].query():
            event, number = self._recorded.popleft()
            self._spare.append(event)
            signs[0] += 1
            if self._arrived and number:
                self._arrived(number)
        signs[1] = len(self._recorded)

    def _watch(self, signs: memoryview) -> None:
        with suppress(RuntimeError):  # where CUDA has failed, whoever computes says so
            while True:
                time.sleep(LOOK_SECONDS)
                self.look(signs)
