"""What a rank's trace says: time by phase, waiting by axis, the operators' own time, how much a GPU stood idle."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from phalanx.watch.trace import Event, RankTrace

GPU = ("kernel", "gpu_memcpy", "gpu_memset")
Span = tuple[float, float]
"""From when to when, in microseconds."""


@dataclass(frozen=True)
class RankTimes:
    """Of one rank, in microseconds, over all steps of its trace."""

    label: str
    rank: int
    steps: list[float]
    """How long each took."""
    window: float
    """From the first one's begin to the last one's end."""
    phases: Mapping[str, float]
    waits_in: Mapping[str, float]
    """By phase, for how much of it the rank waited for others."""
    waits: Mapping[str, float]
    """By axis and collective."""
    operators: Mapping[str, float]
    """Their own time, without what they call: on a GPU that of kernels."""
    calls: Mapping[str, int]
    gpu_busy: float | None
    """For how long a GPU did anything; None: there is none."""
    gpu_exposed: float
    """For how long a GPU only communicated."""
    by_axis: Mapping[str, float]
    """Of a GPU's communication."""

    @property
    def works(self) -> float:
        """What of the steps it did not wait for others; with a GPU, for how long that computed."""
        if self.gpu_busy:
            return self.gpu_busy - self.gpu_exposed
        return sum(self.steps) - sum(self.waits_in.values())

    @classmethod
    def of(cls, part: RankTrace) -> RankTimes:
        timed = [event for event in part.events if event["ph"] == "X"]
        ranges = [event for event in timed if event.get("cat") == "user_annotation"]
        steps = sorted((event for event in ranges if event["name"].startswith("step ")), key=_begin)
        phases = sorted((event for event in ranges if event["name"].startswith("phase: ")), key=_begin)
        waits = [event for event in _inside(steps, ranges) if event["name"].startswith("wait: ")]
        spans = [_span(event) for event in steps]
        window = (min(b for b, _ in spans), max(e for _, e in spans)) if spans else (0.0, 0.0)
        kernels = [event for event in timed if event.get("cat") in GPU]
        counted = kernels or [event for event in _inside(steps, timed) if event.get("cat") == "cpu_op"]
        own = ((event, _length(event)) for event in kernels) if kernels else _own_times(counted)
        operators = _sums((event["name"], time) for event, time in own)
        busy, exposed = _gpu(kernels, window)
        return cls(
            part.label, part.rank, [_length(event) for event in steps], window[1] - window[0],
            _sums((event["name"].removeprefix("phase: "), _length(event)) for event in phases),
            _sums(_placed(phases, waits)),
            _sums((event["name"].removeprefix("wait: "), _length(event)) for event in waits),
            operators, Counter(event["name"] for event in counted),
            busy if part.facts["device"].startswith("cuda") else None, exposed,
            _sums((_axis(event), _length(event)) for event in kernels if _communicates(event)),
        )  # fmt: skip


def _begin(event: Event) -> float:
    return float(event["ts"])


def _length(event: Event) -> float:
    return float(event.get("dur", 0))


def _span(event: Event) -> Span:
    return _begin(event), _begin(event) + _length(event)


def _sums(pairs: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in pairs:
        found[name] = found.get(name, 0.0) + value
    return found


def _inside(steps: list[Event], events: list[Event]) -> Iterable[Event]:
    """Those that began in a step: an evaluation between two is none."""
    begins = [_begin(event) for event in steps]
    for event in events:
        index = bisect_right(begins, _begin(event)) - 1
        if index >= 0 and _begin(event) <= _span(steps[index])[1]:
            yield event


def _placed(phases: list[Event], waits: list[Event]) -> Iterable[tuple[str, float]]:
    """Each wait under the phase that it began in."""
    begins = [_begin(event) for event in phases]
    for wait in waits:
        index = bisect_right(begins, _begin(wait)) - 1
        if index >= 0 and _begin(wait) <= _span(phases[index])[1]:
            yield phases[index]["name"].removeprefix("phase: "), _length(wait)


def _own_times(events: list[Event]) -> Iterable[tuple[Event, float]]:
    """Each with its time less that of those inside it, thread by thread."""
    by_thread: dict[Any, list[Event]] = {}
    for event in events:
        by_thread.setdefault((event.get("pid"), event.get("tid")), []).append(event)
    for own in by_thread.values():
        open_events: list[list[Any]] = []  # event, its end, its own time
        for event in sorted(own, key=lambda e: (_begin(e), -_length(e))):
            begin, end = _span(event)
            while open_events and open_events[-1][1] <= begin:
                done = open_events.pop()
                yield done[0], max(0.0, done[2])
            if open_events:
                open_events[-1][2] -= _length(event)
            open_events.append([event, end, _length(event)])
        for event, _, rest in open_events:
            yield event, max(0.0, rest)


def _communicates(event: Event) -> bool:
    return "nccl" in event["name"].lower()


def _axis(event: Event) -> str:
    """The process group of a kernel of NCCL's is called as its axis."""
    said = event.get("args", {})
    axis = said.get("Process Group Description") or "axis not told"
    kind = said.get("Collective name") or event["name"].partition("(")[0]
    return f"{axis} {kind}"


def _gpu(kernels: list[Event], window: Span) -> tuple[float, float]:
    """Within the window: for how long anything ran, and for how long nothing but communication."""
    every = _union([_cut(_span(event), window) for event in kernels])
    computing = _union([_cut(_span(event), window) for event in kernels if not _communicates(event)])
    busy = sum(end - begin for begin, end in every)
    return busy, busy - sum(end - begin for begin, end in computing)


def _cut(span: Span, window: Span) -> Span:
    begin = min(max(span[0], window[0]), window[1])
    return begin, max(begin, min(span[1], window[1]))


def _union(spans: list[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found
