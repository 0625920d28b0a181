"""The screen: a table at the start, and one live line while it runs."""

from __future__ import annotations

import math
import resource
import shutil
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import IO, Protocol

import torch

from phalanx.redact import redact
from phalanx.words import in_flops, in_time, round_number

REFRESH_SECONDS = 0.1
QUIET_SECONDS = 60.0
LINES = 20
"""About so many lines a run has where they do not renew themselves, besides one a minute."""
SHOWN = 3
"""Of what a task logs, at most so many have room on the line; of more none is shown."""
RECENT, RECENT_SECONDS = 50, 10.0
"""So many of the last steps tell how fast it goes, or those of so many seconds, and one at least."""


class ShownStep(Protocol):
    """What is shown of a step."""

    step: int
    loss: float
    losses: dict[str, float]
    """Of those that it is the sum of, by name."""
    logged: dict[str, float]
    """What the task logs, by name."""
    turn: str
    """Whose turn it was, where steps take turns."""
    skipped: bool
    count: float
    """Terms of the loss: samples, or tokens."""
    slots: int
    """Samples."""
    flops: float
    """Of the model for a rank's share of them; 0: not known."""


class Screen:
    """Rank 0's output. On a terminal a line that renews itself; elsewhere one every so many steps, and every minute."""

    def __init__(
        self,
        steps: int,
        counts: str,
        device: torch.device,
        out: IO[str] | None = None,
        *,
        every: int = 0,
        quiet: bool = False,
        peak: float | None = None,
    ) -> None:
        """``counts``: what a rate is of, samples or tokens.

        ``every``: a line that stays every so many steps, and no others but the live one; ``quiet``: only what is noted.
        ``peak``: FLOP/s that a rank's device can do, if that is known.
        """
        self.steps, self.counts, self.device, self.out = steps, counts, device, out or sys.stdout
        self.every, self.quiet, self.peak = every, quiet, peak
        self.live = self.out.isatty()
        self.open = True
        self.shown = time.monotonic()
        self._recent = self.shown
        self.seconds: deque[float] = deque(maxlen=RECENT)
        self.amounts: deque[float] = deque(maxlen=RECENT)
        self.flops: deque[float] = deque(maxlen=RECENT)
        """Of the last steps: how long each took, how many samples or tokens it had, and what they cost."""
        self.whole = (0.0, 0.0)
        """Of all steps but the first, which also begins the run: seconds, and samples or tokens."""
        self._begun = False
        self.losses: dict[str, str] = {}
        """Of the last step, or of the last of each turn."""

    def table(self, facts: Mapping[str, str], notes: Iterable[str]) -> None:
        """What there is to say before the first step, a line each."""
        for name, text in facts.items() if not self.quiet else ():
            self._write(f"{name:>7}  {text}")
        for text in notes:
            self._write(f"   note  {text}")

    def note(self, text: str) -> None:
        self.said(f"   note  {text}")

    def resumed(self, source: str, step: int) -> None:
        if not self.quiet:
            self.said(f" resume  after step {step} from {source}")

    def said(self, line: str) -> None:
        self._write(("\r" if self.live else "") + line)

    def step(self, metrics: ShownStep) -> None:
        if self.quiet:
            return
        self.losses[metrics.turn] = _loss(metrics)
        now = time.monotonic()
        amount = metrics.count if self.counts == "tokens" else metrics.slots
        self._count(now - self._recent, amount, metrics.flops)
        self._recent = now
        done, steps = metrics.step + 1, self.steps
        stays = done == steps or (bool(self.every) and done % self.every == 0)
        due = now - self.shown >= (REFRESH_SECONDS if self.live else math.inf if self.every else QUIET_SECONDS)
        if not (due or stays or (not self.live and not self.every and done % round_number(steps / LINES) == 0)):
            return
        self.shown = now
        line = self._line(metrics)
        if self.live:
            width = shutil.get_terminal_size().columns - 1
            self._write("\r" + line[:width].ljust(width), end="\n" if stays else "")
        else:
            self._write(line)

    def _count(self, seconds: float, amount: float, flops: float) -> None:
        """Add a step to the last ones, and let go of those that are past."""
        recent = (self.seconds, self.amounts, self.flops)
        if self._begun and not self.whole[0]:
            for each in recent:
                each.clear()
        for each, value in zip(recent, (seconds, amount, flops), strict=True):
            each.append(value)
        while len(self.seconds) > 1 and sum(self.seconds) - self.seconds[0] >= RECENT_SECONDS:
            for each in recent:
                each.popleft()
        if self._begun:
            self.whole = self.whole[0] + seconds, self.whole[1] + amount
        self._begun = True

    def _line(self, metrics: ShownStep) -> str:
        done = metrics.step + 1
        seconds = max(sum(self.seconds), 1e-9)  # both of the same steps
        rate, left = sum(self.amounts) / seconds, seconds / len(self.seconds) * (self.steps - done)
        speed, to_come = f"{rate:,.0f} {self.counts}/s", f"  {in_time(left)} left"
        if done == self.steps and self.whole[0]:
            speed, to_come = f"{self.whole[1] / self.whole[0]:,.0f} {self.counts}/s on average", ""
        bar = "━" * round(10 * done / self.steps)
        losses = "  ".join(self.losses.values())
        return (
            f"{bar:─<10} step {done}/{self.steps}  {losses}  {speed}  {self._used()}"
            f"{memory_bytes(self.device) / 2**30:.2f} GiB{to_come}"
        )

    def _used(self) -> str:
        """How much the device computes, by those of the last steps whose FLOPs are known."""
        known = [(flops, seconds) for flops, seconds in zip(self.flops, self.seconds, strict=True) if flops]
        if not known:
            return ""
        rate = sum(flops for flops, _ in known) / max(1e-9, sum(seconds for _, seconds in known))
        return in_flops(rate) + (f", MFU {rate / self.peak:.1%}" if self.peak else "") + "  "

    def evaluation(self, step: int, measures: dict[str, float]) -> None:
        if self.quiet:
            return
        text = "  ".join(f"{name} {value:.4f}" for name, value in measures.items())
        self._write(("\r" if self.live else "") + f"held out after step {step + 1}: {text}")

    def _write(self, text: str, end: str = "\n") -> None:
        """A reader that goes away does not end the training."""
        if self.open:
            try:
                print(redact(text), file=self.out, end=end, flush=True)
            except (BrokenPipeError, ValueError):
                self.open = False


def memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: on the GPU by tensors, on the host by the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _loss(metrics: ShownStep) -> str:
    """Under the name of its turn, where steps take turns."""
    if metrics.skipped:
        return f"{metrics.turn} skipped: not finite".lstrip()
    named = ", ".join(f"{name} {value:.4f}" for name, value in metrics.losses.items())
    logged = metrics.logged.items() if len(metrics.logged) <= SHOWN else ()
    more = "".join(f"  {name} {value:.4g}" for name, value in logged)
    return f"{metrics.turn or 'loss'} {metrics.loss:.4f}" + (f" ({named})" if named else "") + more
