"""Which method hides communication, by what was measured: the most exact whose step is about as short as any.

A step takes what it computes, what its codec takes, and what of the communication backward does not hide. A link that
keeps up with exact gradients leaves nothing to gain, so then they stay exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx.comm import EXACT
from phalanx.comm_methods import Candidate

CLOSE = 1.05
"""A step up to so many times the shortest is as good, where its method is more exact."""
GAIN = 1.1
"""By so much a step must become shorter for a method to be left."""
NO_LOSS = 0.98
"""Or, for one that is more exact, at least not longer."""
OTHER_LINK = 2.0
"""By so much a link must be faster or slower for what was learned on it to be forgotten."""
FEWER = 8
"""Times fewer bytes that are sent of a bucket than its gradients have, about."""
AWHILE = 0.005
"""Seconds that a bucket travels at least: what starting one takes is little beside that."""
LEAST_BYTES = 4 << 20


@dataclass(frozen=True)
class Conditions:
    """Of a run: the same on all ranks."""

    compute: float
    """Seconds of a step without communication and codecs."""
    hides: float
    """Seconds of it during which gradients may travel."""
    sent: float
    """Bytes that a rank sends of exact gradients in a step."""
    rate: float
    """Bytes a second that it can send."""
    latency: float
    """Seconds that the smallest message takes."""
    beside: float = 0.0
    """Bytes that it sends of what travels as it is, whatever the method: weights that are gathered."""
    hosts_first: float | None = None
    """Bytes a second that it can send where collectives go inside of hosts first, if any do."""
    straight: float = 1.0
    """The part of what is encoded that goes from rank to rank all the same."""

    def predicted(self, method: Candidate, codec: float) -> float:
        """Seconds of a step; ``codec``: of these for encoding and decoding."""
        sent = self.sent * method.bytes
        straight = 0.0 if method.name == EXACT else self.straight * sent
        travel = straight / self.rate + (sent - straight + self.beside) / (self.hosts_first or self.rate)
        travel += 2 * self.latency
        return self.compute + codec + max(0.0, travel - self.hides)


def choose(predicted: Mapping[str, float], methods: Sequence[Candidate], current: str) -> str:
    """By name. ``methods``: from the most exact to the least. One that is in use is left for a gain alone."""
    names = [method.name for method in methods]
    best = min(predicted[name] for name in names)
    wanted = next(name for name in names if predicted[name] <= CLOSE * best)
    if current not in names:
        return wanted
    gain = predicted[current] / predicted[wanted]
    more_exact = names.index(wanted) < names.index(current)
    return wanted if gain >= GAIN or (more_exact and gain >= NO_LOSS) else current


class Experience:
    """How many times as long as predicted steps with methods that were tried took.

    A stall, or a machine that was busy, may have been to blame: a method that was tried counts as it is predicted again
    after the next measurement of the link, when it was tried twice after two, then after four and so on. One that was
    in use, and is left for another, has not been tried for that.
    """

    def __init__(self) -> None:
        self._factors: dict[str, float] = {}
        self._left, self._tries = Counter[str](), Counter[str]()
        """By method: measurements of the link until its factor is forgotten, and how often it was learned."""
        self._rate = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._factors

    def measured(self, rate: float, current: str) -> None:
        """The link was, and is so fast. Of the method in use nothing is forgotten, unless the link is another one."""
        if not rate / OTHER_LINK < self._rate < rate * OTHER_LINK:
            for known in (self._factors, self._left, self._tries):
                known.clear()
        for name in set(self._factors) - {current}:
            self._left[name] -= 1
            if self._left[name] <= 0:
                del self._factors[name]
        self._rate = self._rate if self._factors else rate

    def learn(self, name: str, taken: float, predicted: float) -> None:
        """Steps with a method that was on trial took so many seconds."""
        self._factors[name] = taken / predicted
        self._left[name] = 1 << self._tries[name]
        self._tries[name] += 1

    def know(self, name: str, taken: float, predicted: float) -> None:
        """Steps with the method that is in use, or has been until now, took so many. It may once have been on trial."""
        self._factors[name] = taken / predicted
        self._left.pop(name, None)
        self._tries.pop(name, None)

    def corrected(self, predicted: Mapping[str, float]) -> dict[str, float]:
        """Predictions, by what is known."""
        return {name: seconds * self._factors.get(name, 1.0) for name, seconds in predicted.items()}


@dataclass(frozen=True)
class MethodTrial:
    """Of a method that has just been chosen."""

    taken: Mapping[str, float]
    """Seconds of steps with the method that was in use, and then with those that were tried since."""
    predicted: Mapping[str, float]
    """By the model alone, of all methods."""

    def judged(
        self, own: str, seconds: float, experience: Experience, methods: Sequence[Candidate]
    ) -> tuple[str, MethodTrial | None]:
        """The method to go on with, now that steps take so many ``seconds``; and its trial, unless it had one.

        Of those that were tried the most exact is kept that is hardly longer than the shortest. It is left for one that
        was not where that promises a gain: each is tried once at most.
        """
        taken = {**self.taken, own: seconds}
        in_use = next(iter(taken))
        experience.know(in_use, taken[in_use], self.predicted[in_use])
        experience.learn(own, seconds, self.predicted[own])
        best = choose(taken, [each for each in methods if each.name in taken], "")
        wanted = choose(experience.corrected(self.predicted) | taken, methods, best)
        return wanted, None if wanted in taken else MethodTrial(taken, self.predicted)


def bucket_bytes(latency: float, rate: float, most: int) -> int:
    """How much of the gradients is to travel together: about as much as a link holds at a time, times `FEWER`.

    Smaller ones leave while more of backward is to come; what is on its way at the same time then fills the link. Of
    few sizes, so that runs on one link find the same.
    """
    wanted, size = FEWER * rate * max(latency, AWHILE), LEAST_BYTES
    while 2 * size <= wanted:
        size *= 2
    return min(size, most)
