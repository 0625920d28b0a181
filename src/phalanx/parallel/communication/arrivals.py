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
        self, signs: memoryview, arrived: Callable[[int], None], event: Callable[[], Any] = torch.cuda.Event
    ) -> None:
        """``signs[0]``: how many it has come to, each of which ``arrived`` is told; ``signs[1]``: has yet to."""
        self._signs, self._arrived, self._event = signs, arrived, event
        self._recorded: deque[tuple[Any, int]] = deque()
        self._spare: deque[Any] = deque()
        self._thread: threading.Thread | None = None

    @property
    def begun(self) -> bool:
        """Whether any collective was launched on a GPU."""
        return self._thread is not None

    def launching(self, record: int) -> None:
        """A collective is launched next."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="arrivals", daemon=True)
            self._thread.start()
        event = self._spare.popleft() if self._spare else self._event()
        event.record()
        self._recorded.append((event, record))
        self._signs[1] = len(self._recorded)

    def look(self) -> None:
        """Count those that the GPU has come to."""
        while self._recorded and self._recorded[0][0].query():
            event, record = self._recorded.popleft()
            self._spare.append(event)
            self._signs[0] += 1
            self._arrived(record)
        self._signs[1] = len(self._recorded)

    def _watch(self) -> None:
        with suppress(RuntimeError):  # where CUDA has failed, whoever computes says so
            while True:
                time.sleep(LOOK_SECONDS)
                self.look()
