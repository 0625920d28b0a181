"""Pipeline schedules: in which order a rank of ``pp`` does its forwards and backwards.

Each is found by playing the pipeline through: ranks act when what they wait for is there, by one rule a schedule. What
was played without a rank ever stuck cannot deadlock, for any number of micro-batches.

    gpipe         all forwards, then all backwards
    1f1b          a backward as soon as one is ready; as few micro-batches in flight as keep all ranks busy
    interleaved   1f1b with two smaller stages a rank, which halves the time to fill and drain
    zb            1f1b with backward in two: the input's gradient at once, the weights' where a rank would wait
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from phalanx.layout import CHUNKS

Kind = Literal["forward", "backward", "weights"]


@dataclass(frozen=True)
class Action:
    """One piece of a rank's work: a micro-batch at a stage."""

    kind: Kind
    stage: int
    micro: int


def alone(micro_batches: int) -> list[Action]:
    """Without a pipeline: each micro-batch forward and backward."""
    return [Action(kind, 0, micro) for micro in range(micro_batches) for kind in ("forward", "backward")]


def forwards(name: str, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank in an evaluation, in order."""
    chunks = range(CHUNKS.get(name, 1))
    return tuple(
        tuple(Action("forward", chunk * ranks + rank, micro) for micro in range(micro_batches) for chunk in chunks)
        for rank in range(ranks)
    )


Receives = dict[Action | None, list[Action]]
"""The actions whose messages a rank begins to receive at the start (None), and after each action that sends one."""


@cache
def receives(name: str, ranks: int, micro_batches: int, training: bool) -> tuple[Receives, ...]:
    """What every rank receives, and when it begins to, in a step or (not ``training``) an evaluation.

    Messages are numbered by when they are made on a clock that all share, so each follows from those of lower numbers
    alone. Every rank launches its sends and receives in that order: so the lowest that is not over always can be, even
    where a device runs one at a time, and no rank ever waits for what follows from something it has yet to launch.
    """
    every = (schedule if training else forwards)(name, ranks, micro_batches)
    last = ranks * CHUNKS.get(name, 1) - 1
    due: tuple[Receives, ...] = tuple({None: []} for _ in range(ranks))
    sent: list[Action | None] = [None] * ranks
    over = _over(every, last)
    for action in sorted(over, key=lambda action: (over[action], action.kind, action.stage, action.micro)):
        after = action.stage + {"forward": 1, "backward": -1, "weights": last + 1}[action.kind]
        if 0 <= after <= last:
            sender, receiver = action.stage % ranks, after % ranks
            due[receiver][sent[receiver]].append(Action(action.kind, after, action.micro))
            sent[sender] = action
            due[sender][action] = []
    return due


def _over(every: Sequence[Sequence[Action]], last: int) -> dict[Action, int]:
    """When each action is over, where ranks act as soon as they can."""
    over: dict[Action, int] = {}
    free, left = [0] * len(every), [list(reversed(actions)) for actions in every]
    while any(left):
        for rank, actions in enumerate(left):
            while actions:
                needs = _needs(actions[-1], last)
                if needs is not None and needs not in over:
                    break
                free[rank] = max(free[rank], over[needs] if needs else 0) + 1
                over[actions.pop()] = free[rank]
    return over


def _needs(action: Action, last: int) -> Action | None:
    """The action whose result another one works on."""
    if action.kind == "forward":
        return Action("forward", action.stage - 1, action.micro) if action.stage else None
    if action.kind == "backward" and action.stage < last:
        return Action("backward", action.stage + 1, action.micro)
    return Action("forward" if action.kind == "backward" else "backward", action.stage, action.micro)


@cache
def schedule(name: str, ranks: int, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """The actions of every rank, in order."""
    slack = 0
    while (played := _Play(name, ranks, micro_batches, slack).actions()) is None:
        slack += 1  # the rule was too tight for this number of micro-batches
    return tuple(tuple(own) for own in played)


class _Play:
    """Ranks in front of the same clock."""

    def __init__(self, name: str, ranks: int, micro_batches: int, slack: int) -> None:
        self.name, self.ranks, self.micro_batches, self.slack = name, ranks, micro_batches, slack
        self.chunks = CHUNKS.get(name, 1)
        self.last = self.chunks * ranks - 1
        self.split = name == "zb"
        self.free = [0] * ranks
        self.ready: dict[tuple[str, int, int], int] = {}
        """When an action was over."""
        groups = [range(start, min(start + ranks, micro_batches)) for start in range(0, micro_batches, ranks)]
        chunks = range(self.chunks)
        self.forwards = [[(c, m) for group in groups for c in chunks for m in group] for _ in range(ranks)]
        self.backwards = [[(c, m) for group in groups for c in reversed(chunks) for m in group] for _ in range(ranks)]
        self.weights: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        self.begun = [0] * ranks
        """Micro-batches on their way: forward is over, backward is not."""

    def actions(self) -> list[list[Action]] | None:
        """What every rank does; None if they got stuck."""
        done: list[list[Action]] = [[] for _ in range(self.ranks)]
        total = self.ranks * self.chunks * self.micro_batches * (3 if self.split else 2)
        now = 0
        while sum(map(len, done)) < total:
            acted = False
            for rank in range(self.ranks):
                kind = self._choice(rank, now) if self.free[rank] <= now else None
                if kind is not None:
                    done[rank].append(self._act(kind, rank, now))
                    acted = True
            if not acted and all(free <= now for free in self.free):
                return None
            now += 1
        return done

    def _choice(self, rank: int, now: int) -> Kind | None:
        forward = bool(self.forwards[rank]) and self._can("forward", rank, now)
        backward = bool(self.backwards[rank]) and self._can("backward", rank, now)
        behind, begun = self.ranks - rank - 1, self.begun[rank]
        if self.name == "gpipe":
            return "forward" if forward else "backward" if backward and not self.forwards[rank] else None
        if self.name == "1f1b":
            return "backward" if backward else "forward" if forward and begun <= behind else None
        if self.name == "interleaved":  # so many forwards to begin with, then strictly in turn
            turn = self.forwards[rank] and begun <= 2 * behind + self.ranks + self.slack
            return ("forward" if forward else None) if turn else ("backward" if backward else None)
        if forward and begun <= behind and begun + len(self.weights[rank]) < self.ranks:
            return "forward"
        return "backward" if backward else "weights" if self.weights[rank] else None

    def _can(self, kind: Kind, rank: int, now: int) -> bool:
        chunk, micro = (self.forwards if kind == "forward" else self.backwards)[rank][0]
        stage = chunk * self.ranks + rank
        if kind == "forward":
            needs = ("forward", stage - 1, micro) if stage else None
        else:
            needs = ("backward", stage + 1, micro) if stage < self.last else ("forward", stage, micro)
        return needs is None or self.ready.get(needs, now + 1) <= now

    def _act(self, kind: Kind, rank: int, now: int) -> Action:
        waiting = {"forward": self.forwards, "backward": self.backwards, "weights": self.weights}[kind][rank]
        chunk, micro = waiting.pop(0)
        stage = chunk * self.ranks + rank
        if kind == "backward" and self.split:
            self.weights[rank].append((chunk, micro))
        self.begun[rank] += {"forward": 1, "backward": -1, "weights": 0}[kind]
        self.free[rank] = now + (2 if kind == "backward" and not self.split else 1)
        self.ready[kind, stage, micro] = self.free[rank]
        return Action(kind, stage, micro)
