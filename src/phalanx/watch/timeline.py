"""A rank's last steps, phase by phase: what of them it computed, and what it waited for others."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from phalanx.flight import (
    COMPILED,
    COMPILING,
    DEVICE_WAITED,
    HAD,
    ON_DEVICE,
    ON_GPU,
    PHASES,
    QUEUED,
    SPENT,
    WAITED,
    Flight,
)

STEPS_OWN = ("data", "forward", "backward", "reduce", "update", "wait", "checkpoint", "callbacks")
HOSTS_OWN = ("data", "checkpoint", "callbacks")
MEASURED = 32
"""Of the last steps."""
WARM = 2
"""The first steps of a generation are not like the others: memory is got, kernels are chosen."""


@dataclass(frozen=True)
class Timeline:
    """``busy`` and ``waited``: seconds by phase and step, without and in collectives."""

    rank: int
    steps: list[int]
    busy: np.ndarray
    waited: np.ndarray
    processor: np.ndarray
    """By step, seconds that its main thread had one, and that it waited for one; zeros: the system does not say."""
    compiled: np.ndarray
    """By step, how many functions were compiled, and for how long."""
    on_gpu: bool
    """Its collectives are a GPU's: what the host waits for is not known, and counts as computed."""
    device: np.ndarray
    """By step, seconds that its GPU took, and of these in collectives, by the GPU's own clock; zeros: it has none."""

    @property
    def seconds(self) -> float:
        """Of a usual step."""
        return float(np.median((self.busy + self.waited).sum(1)))

    @property
    def total(self) -> float:
        """Of all these steps."""
        return float((self.busy + self.waited).sum())

    def usual(self, phase: str) -> float:
        """What a usual step computes in a phase."""
        return float(np.median(self.busy[:, PHASES.index(phase)]))

    @property
    def usual_device(self) -> float:
        """What its GPU computes in a usual step, by its own clock."""
        return float(np.median(self.device[:, 0] - self.device[:, 1]))

    @property
    def usual_busy(self) -> float:
        """What a usual step takes without waiting for others, on the host and on its GPU."""
        own = HOSTS_OWN if self.on_gpu else STEPS_OWN
        host = float(np.median(self.busy[:, [PHASES.index(phase) for phase in own]].sum(1)))
        return host + self.usual_device

    @property
    def usual_queue(self) -> float:
        """Seconds of a usual step that it could have computed, had others not had the processor."""
        return float(np.median(self.processor[:, 1]))

    @property
    def starved(self) -> float:
        """Of the time that its main thread could have computed, the share that it had no processor for."""
        had, queued = self.processor.sum(0).tolist()
        return float(queued / (had + queued)) if had + queued > 0 else 0.0

    @property
    def usual_wait(self) -> float:
        return float(np.median(self.waited.sum(1)))

    def share(self, phase: str) -> tuple[float, float]:
        """The seconds of a phase in all these steps, waits among them, and their share of all."""
        column = PHASES.index(phase)
        spent = float(self.busy[:, column].sum() + self.waited[:, column].sum())
        return spent, spent / max(1e-9, float((self.busy + self.waited).sum()))


def timeline(flight: Flight) -> Timeline | None:
    """Of its last steps that are over; None if there are none."""
    rows = flight.steps[:-1]
    rows = rows[rows[:, 0] - 1 >= flight.first + WARM]
    if not len(rows):
        return None
    spent = rows[:, SPENT : SPENT + len(PHASES)] / 1e9
    waited = np.minimum(rows[:, WAITED : WAITED + len(PHASES)] / 1e9, spent)
    on_gpu = bool((flight.records["flags"] & ON_GPU).any())
    steps = (rows[:, 0] - 1).tolist()
    compiled = rows[:, [COMPILED, COMPILING]] / (1, 1e9)
    processor, device = rows[:, [HAD, QUEUED]] / 1e9, rows[:, [ON_DEVICE, DEVICE_WAITED]] / 1e9
    return Timeline(flight.rank, steps, spent - waited, waited, processor, compiled, on_gpu, device)


def transfers(flights: dict[int, Flight], lines: dict[int, Timeline]) -> dict[str, float]:
    """By group: seconds of a usual step that all of its ranks were in its collectives, so that none waited for another.

    By each rank's own clock. Who comes last waits for messages alone: the least that a rank was there is what they
    took.
    """
    found: dict[str, list[np.ndarray]] = {}
    for rank, line in lines.items():
        flight = flights[rank]
        kept = np.isin(flight.steps[:, 0] - 1, line.steps)
        for group in flight.groups if not line.on_gpu else ():
            found.setdefault(group, []).append(flight.waited(group)[kept][-MEASURED:])
    return {
        group: float(np.median(np.min([rows[-min(map(len, each)) :] for rows in each], axis=0)))
        for group, each in found.items()
        if len(each) > 1
    }


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
