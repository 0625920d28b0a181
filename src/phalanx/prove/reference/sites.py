"""EverySite on one device: what a layout's ``comm=local:H`` and ``comm=diloco:H`` mean, each site trained in turn.

It shares with training what a text form says, and which parts of a weight are a rank's own; when sites agree, on what
and by which arithmetic is written here a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from phalanx.data.order import Order, share
from phalanx.layout import Layout
from phalanx.local_updates import LocalUpdates
from phalanx.parallel.weights.placement import Placement
from phalanx.prove.reference.coded import parts_of, rounded
from phalanx.prove.reference.evaluation import measured
from phalanx.prove.reference.hostile import Hostile
from phalanx.prove.reference.loop import Reference, Slots
from phalanx.prove.reference.steady import Decisions
from phalanx.task import Task


class EverySite:
    """A task's run on one device that is every site in turn, as far as it has come."""

    def __init__(
        self,
        task: Task,
        layout: Layout,
        placement: Placement,
        nudge: int = 0,
        decisions: Sequence[Decisions] | None = None,
    ) -> None:
        """``placement``: of one site. ``nudge`` and ``decisions``: as of a `Reference`, the latter by site."""
        assert isinstance(task, Hostile)
        assert layout.local is not None
        self.task, self.layout, self.local = task, layout, layout.local
        self.sites = [
            Reference(
                task,
                nudge=nudge,
                decisions=None if decisions is None else decisions[site],
                own=partial(self._own, site),
            )
            for site in range(layout.dp)
        ]
        self.rate, self.momentum = self.local.outer
        self.agreed = {name: weight.detach().clone() for name, weight in self.sites[0].trained.items()}
        self.velocity = {name: torch.zeros_like(weight) for name, weight in self.agreed.items()}
        self.sent: dict[str, list[Tensor]] = {}
        """By weight, what each site has when it leaves."""
        self.pieces = {name: list(parts_of(name, placement)) for name in self.agreed}
        self.fragments = divided({name: weight.numel() for name, weight in self.agreed.items()}, self.local.fragments)

    @property
    def steps(self) -> list[object]:
        """Those that are done."""
        return [*self.sites[0].steps]

    def _own(self, site: int, order: Order, ids: np.ndarray) -> list[Slots]:
        """The slots of a step with these samples that a site's ranks compute, in the order of micro-batches."""
        layout, each, tokens = self.layout, self.layout.fsdp, order.tokens(ids)
        number = order.micro_batches(len(ids), layout.micro_batches(self.task.global_batch))
        ranges = [share(len(ids), number, layout.batch_ranks, site * each + rank, tokens) for rank in range(each)]
        return [own[micro] for micro in range(len(ranges[0])) for own in ranges]

    def run(self, steps: int) -> EverySite:
        """Train so many steps more."""
        for _ in range(steps):
            number = len(self.steps)
            if number == self.task.steps - 1:
                self._evaluate()
            for site in self.sites:
                self.task.proof_trial.moment = site.moment
                site.steps.append(site.step(number))
            self._agree(number + 1)
            self._count(number)
            for site in self.sites:
                last = site.steps[-1]
                last.weights = site.weights()
                last.agreed, last.velocity = dict(self.agreed), dict(self.velocity)
        return self

    def _evaluate(self) -> None:
        """With what sites have agreed on."""
        first = self.sites[0]
        own = first.weights()
        for name, value in self.agreed.items():
            first.trained[name].data.copy_(value)
        self.task.proof_trial.moment = first.moment
        found = measured(first)
        for name in self.agreed:
            first.trained[name].data.copy_(own[name])
        for site in self.sites:
            site.evaluation = found

    def _count(self, number: int) -> None:
        """Terms that all know of after a step: what has been told by then; at the end, all."""
        late, last = self.local.overlap, number == self.task.steps - 1
        told = range(max(0, number - late), number + 1 if last else max(0, number - late + 1))
        total = sum(site.steps[step].count for site in self.sites for step in told if late <= number or last)
        for site in self.sites:
            site.steps[number].terms = total

    @torch.no_grad()
    def _agree(self, step: int) -> None:
        """What is agreed on after so many steps."""
        local, last = self.local, step == self.task.steps
        place = (step - 1) % local.every + 1
        for number, names in enumerate(self.fragments):
            arrives = (number + 1) * local.every // local.fragments
            leaves = arrives - local.overlap
            if place == leaves or (last and not leaves <= place <= arrives):
                for name in names:
                    self.sent[name] = [site.trained[name].detach().clone() for site in self.sites]
            if place == arrives or last:
                for name in names:
                    self._outer(name)
                    for site, sent in zip(self.sites, self.sent[name], strict=True):
                        site.trained[name].data.sub_(sent).add_(self.agreed[name])
                    if last and local.overlap:
                        late = self._change(name, [site.trained[name] for site in self.sites])
                        self.agreed[name] = self.agreed[name] - late
                    for site in self.sites if last else ():
                        site.trained[name].data.copy_(self.agreed[name])

    def _outer(self, name: str) -> None:
        """A step of the outer optimizer: Nesterov's momentum."""
        change = self._change(name, self.sent[name])
        self.velocity[name] = self.momentum * self.velocity[name] + change
        self.agreed[name] = self.agreed[name] - self.rate * (change + self.momentum * self.velocity[name])

    def _change(self, name: str, weights: Sequence[Tensor]) -> Tensor:
        """From what was agreed on to a weight of each site: the mean of what bytes say of it, with its sign turned."""
        changes = [self._said(name, self.agreed[name] - own) for own in weights]
        return self._said(name, torch.stack(changes).sum(0)) / len(changes)

    def _said(self, name: str, numbers: Tensor) -> Tensor:
        """What bytes say of numbers."""
        if not self.local.codec:
            return numbers
        found, flat = torch.empty_like(numbers), numbers.flatten()
        for indices in self.pieces[name]:
            found.view(-1)[indices] = rounded(self.local.codec, flat[indices])
        return found


def divided(sizes: dict[str, int], fragments: int) -> list[list[str]]:
    """Weights by fragment: in the model's order, each where its middle lies."""
    found: list[list[str]] = [[] for _ in range(fragments)]
    total, before = sum(sizes.values()), 0
    for name, size in sizes.items():
        found[min(fragments - 1, int((before + size / 2) / total * fragments))].append(name)
        before += size
    return found


def boundary(local: LocalUpdates, half: int, steps: int) -> int:
    """The step before which a run of so many ``steps`` is interrupted: sites agree, for the second time if they can."""
    fits = [step for step in range(local.every, steps, local.every) if step >= half]
    return next((step for step in fits if step >= 2 * local.every), fits[-1])
