"""A rank's last steps, phase by phase: what of them it computed, and what it waited for others."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from phalanx.flight import ON_GPU, PHASE, PHASES, Flight

STEPS_OWN = ("data", "forward", "backward", "reduce", "update", "wait", "checkpoint", "callbacks")
HOSTS_OWN = ("data", "checkpoint", "callbacks")
WARM = 2
"""The first steps of a generation are not like the others: memory is got, kernels are chosen."""


@dataclass(frozen=True)
class Timeline:
    """``busy`` and ``waited``: seconds by phase and step, without and in collectives."""

    rank: int
    steps: list[int]
    busy: np.ndarray
    waited: np.ndarray
    on_gpu: bool = False
    """Its collectives are a GPU's: what the host waits for is not known, and counts as computed."""

    @property
    def seconds(self) -> float:
        """Of a usual step."""
        return float(np.median((self.busy + self.waited).sum(1)))

    def usual(self, phase: str) -> float:
        """What a usual step computes in a phase."""
        return float(np.median(self.busy[:, PHASES.index(phase)]))

    @property
    def own(self) -> tuple[str, ...]:
        """Phases in which a rank's host waits for nobody, but for what is known of it."""
        return HOSTS_OWN if self.on_gpu else STEPS_OWN

    @property
    def usual_busy(self) -> float:
        """In these phases."""
        return float(np.median(self.busy[:, [PHASES.index(phase) for phase in self.own]].sum(1)))

    @property
    def usual_wait(self) -> float:
        return float(np.median(self.waited.sum(1)))

    def share(self, phase: str) -> tuple[float, float]:
        """The seconds of a phase in all these steps, waits among them, and their share of all."""
        column = PHASES.index(phase)
        spent = float(self.busy[:, column].sum() + self.waited[:, column].sum())
        return spent, spent / max(1e-9, float((self.busy + self.waited).sum()))


def timeline(flight: Flight) -> Timeline | None:
    """Of the steps that its record has from beginning to end; None if there are none."""
    records = flight.records
    marks = records[records["kind"] == PHASE]
    if len(marks) < 3:
        return None
    begins, phases, steps = marks["launched"], marks["phase"][:-1], marks["step"][:-1].astype(np.int64)
    spent = np.diff(begins).astype(np.float64)
    waits = records[(records["kind"] != PHASE) & ((records["flags"] & ON_GPU) == 0)]
    waits = waits[(waits["waiting"] > 0) & (waits["left"] >= waits["waiting"])]
    inside = np.searchsorted(begins, waits["waiting"], side="right") - 1
    kept = (inside >= 0) & (inside < len(spent))
    waited = np.zeros_like(spent)
    np.add.at(waited, inside[kept], (waits["left"] - waits["waiting"])[kept].astype(np.float64))
    waited = np.minimum(waited, spent)
    whole = [step for step in np.unique(steps)[1:-1].tolist() if step >= int(steps[0]) + WARM]
    if not whole:
        return None
    busy, waits_by_phase = np.zeros((2, len(whole), len(PHASES)))
    for row, step in enumerate(whole):
        np.add.at(busy[row], phases[steps == step], (spent - waited)[steps == step] / 1e9)
        np.add.at(waits_by_phase[row], phases[steps == step], waited[steps == step] / 1e9)
    return Timeline(flight.rank, whole, busy, waits_by_phase, bool((records["flags"] & ON_GPU).any()))


def lateness(flights: dict[int, Flight], ranks: list[int], steps: list[int]) -> dict[int, tuple[float, float]]:
    """By rank: how late it came to collectives, on average, and how often it was the last; nothing across hosts.

    Clocks of hosts are not one, and what a GPU comes to is seen too seldom to tell.
    """
    chosen = {rank: flights[rank] for rank in ranks}
    if len({flight.host for flight in chosen.values()}) > 1:
        return {}
    late: dict[int, list[float]] = {rank: [] for rank in ranks}
    last: dict[int, int] = dict.fromkeys(ranks, 0)
    for group in {group for flight in chosen.values() for group in flight.groups}:
        members = [rank for rank in ranks if group in chosen[rank].groups]
        if len(members) < 2:
            continue
        entered = []
        for rank in members:
            rows = chosen[rank].along(group)
            rows = rows[np.isin(rows["step"], steps) & ((rows["flags"] & ON_GPU) == 0)]
            entered.append(dict(zip(rows["sequence"].tolist(), rows["launched"].tolist(), strict=True)))
        for sequence in set.intersection(*map(set, entered)):
            times = [each[sequence] for each in entered]
            for rank, time in zip(members, times, strict=True):
                late[rank].append((time - median(times)) / 1e9)
            last[members[int(np.argmax(times))]] += 1
    return {rank: (sum(values) / len(values), last[rank] / len(values)) for rank, values in late.items() if values}
