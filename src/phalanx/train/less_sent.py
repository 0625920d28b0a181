"""How much less a run has sent with its ``comm`` than it would have with exact sums: the lines that it ends with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from phalanx.comm import AUTO, EXACT
from phalanx.layout import Layout
from phalanx.run import Run, counted
from phalanx.words import in_bytes

LESS = 1.05
"""So many times as many bytes exact sums must send for a run to have sent less."""


@dataclass
class Sent:
    """By the first rank, in all steps with one layout."""

    layout: Layout
    steps: list[int]
    sent: float = 0.0
    exact: float = 0.0
    """What exact sums would have."""
    exactly: int = 0
    """Steps in which ``auto`` had them."""

    def line(self, several: bool) -> str:
        """``several``: which steps it is of, since there were others."""
        first, last, count = self.steps[0] + 1, self.steps[-1] + 1, len(self.steps)
        what = "of gradients" if self.layout.coded_axis == "dp" else "of gradients and weights"
        share = "no less"
        if self.exact > LESS * self.sent:
            share = f"1/{self.exact / self.sent:.3g}"
        elif self.layout.coded_axis and self.sent > self.exact:
            share = f"more, since {self._why_more()}"
        if self.exactly:
            share += f"; exact in {self.exactly} of {count}"
        those = f"steps {first} to {last}" if last - first + 1 == count else f"{count} of the steps {first} to {last}"
        return (
            f"sent {'to other sites' if self.layout.local else what}{f' in {those}' if several else ''}: "
            f"{in_bytes(self.sent / count)} a step instead of {in_bytes(self.exact / count)} "
            f"(comm={self.layout.comm}: {share})"
        )

    def _why_more(self) -> str:
        method = self.layout.comm.partition(":")[0]
        if method == "topk" and self.layout.dp > 2:  # two do so with exact sums, too
            return "every rank sends to every other"
        if method == "powersgd":
            return "its two thin matrices are larger than small weights"
        return "each weight fills whole blocks"


def less_sent(run: Run) -> list[str]:
    """A line for each layout whose ``comm`` is to send less.

    A mean over steps: a method may begin with exact ones, and sites speak in some steps alone.
    """
    found: dict[str, Sent] = {}
    steps = counted(_with_start(run.events(0)))
    for step, event in steps.items():
        layout, exact = event["start"].get("layout", ""), event["start"].get("exact_bytes", {})
        if exact:
            total = found.setdefault(layout, Sent(Layout.parse(layout), []))
            total.steps.append(step)
            total.sent += sum(event.get("sent", {}).get(axis, 0) for axis in exact)
            total.exact += sum(exact.values())
            total.exactly += event["auto"] == EXACT
    return [total.line(len(total.steps) < len(steps)) for total in found.values() if total.sent]


def _with_start(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Events, each with that of the start of its ranks, and with what ``auto`` does there."""
    start: dict[str, Any] = {}
    auto = ""
    for event in events:
        if event["kind"] == "start":
            start = event
            auto = EXACT if start.get("layout") and Layout.parse(start["layout"]).comm == AUTO else ""
        elif event["kind"] == "comm":
            auto = event["method"]
        yield event | {"start": start, "auto": auto}
