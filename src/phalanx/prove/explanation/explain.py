"""Explaining a difference: where it begins, and what its shape says about the cause.

Two things are found out by trying. Which axes it takes: parts of the layout are left out one by one for as long as the
difference stays. And what was done instead: each hypothesis says exactly what would be found, and is held against it.
"""

from __future__ import annotations

import math

from torch import Tensor

from phalanx.parallel.axes.batchnorm import KINDS, GlobalBatchNorm
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.spread import Spread
from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.filling import fill
from phalanx.parallel.weights.gradients import Gradients
from phalanx.prove.explanation import algebra
from phalanx.prove.explanation.causes import Causes
from phalanx.prove.explanation.finding import Finding
from phalanx.prove.explanation.rungs import EXPLANATIONS, explains
from phalanx.prove.explanation.sites import location, site
from phalanx.prove.ladder import RUNGS, Difference, first
from phalanx.prove.reference.hostile import Hostile
from phalanx.train.engine import Engine
from phalanx.train.step import train_step

FOLLOWED = RUNGS[RUNGS.index("random draws") :]
"""Rungs that may fail because of one that only a record shows."""
TRIED = 6
"""Tensors of a rung that are looked at, until the shape of one says something."""
VAGUE = ("", "unstructured")
STATES = ("given gradients", "moments", "weights", "buffers")


class Inquiry(Causes):
    """Finds what a difference consists of."""

    def finding(self) -> Finding:
        """What failed first, in words."""
        earliest = first(self.differences)
        followed = earliest[0].rung in FOLLOWED and not self.standard.steps[self.step].skipped
        deeper = self.recorded() if followed else []
        found = first(d for d in deeper if d.place < earliest[0].place) or earliest
        names = list(dict.fromkeys(d.name for d in found))
        if found is earliest and found[0].rung not in ("communication", "agreement of ranks"):
            names = self._in_order(names)
        made: list[Finding] = []
        for name in names[:TRIED]:
            made.append(self._explained(next(d for d in found if d.name == name), found, names))
            if made[-1].shape not in VAGUE:
                return made[-1]
        return made[0]

    def _explained(self, lead: Difference, found: list[Difference], names: list[str]) -> Finding:
        ranks = sorted({d.rank for d in found if d.name == lead.name})
        others = [name for name in names if name != lead.name]
        finding = Finding(lead.rung, lead.name, lead.step, lead.error, ranks, list(self.axes), affected=others)
        finding.minimal = str(self.layout)
        explanation = EXPLANATIONS.get(lead.rung)
        if explanation is not None:
            explanation.method(self, finding, lead)
        finding.shape = finding.shape or "unstructured"
        finding.cause = finding.cause or self.nothing_simple(finding)
        finding.where = finding.where or site(
            finding, self.whole.reference.model, self.task, explanation.at if explanation else None
        )
        return finding

    def _in_order(self, names: list[str]) -> list[str]:
        """As the model has its weights."""
        order = {name: index for index, name in enumerate(self.standard.initial)}
        return sorted(names, key=lambda name: order.get(name.split(" ")[0], len(order)))

    @explains("communication")
    def _communication(self, finding: Finding, lead: Difference) -> None:
        finding.shape = "missing message"
        finding.cause = f"{lead.found}."
        rest = first([d for d in [*self.differences, *self.recorded()] if d.rung != "communication"])
        if rest:
            finding.cause += f" What comes of it: {rest[0].rung} of {rest[0].name} differ."
            finding.affected += [name for name in dict.fromkeys(d.name for d in rest) if name not in finding.affected]

    @explains("settings")
    def _settings(self, finding: Finding, lead: Difference) -> None:
        finding.shape = "setting"
        finding.cause = f"{lead.name} is {lead.found} where one device has {lead.expected}."
        option, _, weight = lead.name.partition(" of ")
        if option == "lr" and weight:
            initial = self.standard.steps[self.step].options[weight]["initial_lr"]
            if math.isclose(float(lead.found), initial, rel_tol=1e-9):
                finding.cause += " That is the rate before the schedule's factor, which was not applied."
                return
            rates = {step: initial * self.whole.reference.schedule(step) for step in range(64)}
            other = next((s for s, rate in rates.items() if math.isclose(rate, float(lead.found), rel_tol=1e-9)), None)
            if other is not None:
                finding.cause += f" That is the schedule's rate of step {other}: it is not stepped once a step."
        if len(finding.ranks) < len(self.records):
            finding.cause += " Ranks do not have it alike."

    @explains("samples")
    def _samples(self, finding: Finding, lead: Difference) -> None:
        finding.shape = "wrong samples"
        want = self.standard.steps[self.step]
        finding.cause = f"rank {lead.rank} read samples {lead.found} where its slots of this step hold {lead.expected}."
        if lead.name.startswith("contents"):
            finding.cause = (
                f"the right samples were read, but with {lead.found}: what is drawn while a sample is made does not "
                "follow from (seed, epoch, sample)."
            )
        elif lead.name.startswith("ids"):
            found = [int(n) for n in lead.found.strip("[]").split(",") if n.strip()]
            earlier = [list(step.ids) for step in self.standard.steps[: self.step]]
            ranks = [r.rank for r in self.records if r.rank != lead.rank]
            if any(found == ids[: len(found)] or set(found) <= set(ids) for ids in earlier) and self.step:
                finding.cause += " Those are an earlier step's: the order does not change with the epoch or the step."
            elif set(found) <= set(want.ids.tolist()) and len(ranks):
                finding.cause += " They belong to other slots: of other ranks, or in another order."
        elif lead.name.startswith("division"):
            finding.cause = (
                f"of the slots of this step, not each is computed once by ranks together: slot {lead.found}. Ranks do "
                "not divide the batch between them, or count samples that only stand in."
            )
        elif lead.name.startswith("hash"):
            finding.cause = (
                f"the ids of the global batch are not those of (seed, step, slot): {lead.found}, not {lead.expected}."
            )

    @explains("loss")
    def _loss(self, finding: Finding, lead: Difference) -> None:
        found, want = float(lead.found), float(lead.expected)
        self._number(finding, found, want, f"the {lead.name} of the loss")
        if self.whole.reference.gathers and lead.name == "count" and finding.shape == "ratio":
            finding.cause += (
                " Task.loss gathers samples, and each rank counts others' beside its own: compare own rows with all "
                "that were gathered, and count the own (phalanx.rows)."
            )
            finding.where = finding.where or location(super(Hostile, self.task).loss)  # type: ignore[misc]

    @explains("gradient norm", at=Gradients.norm_squared)
    def _gradient_norm(self, finding: Finding, lead: Difference) -> None:
        found, want = float(lead.found), float(lead.expected)
        self._number(finding, found, want, "the norm of the gradient, whose tensors are right,")
        if finding.shape != "ratio":
            share = (found / want) ** 2
            finding.cause += (
                f" Its square is {share:.3g} of what it should be: it is not taken over all tensors of all ranks once."
            )

    @explains("clip factor", at=train_step)
    def _clip_factor(self, finding: Finding, lead: Difference) -> None:
        self._number(finding, float(lead.found), float(lead.expected), "the factor that clipping gives")

    def _number(self, finding: Finding, found: float, want: float, what: str) -> None:
        if not (math.isfinite(found) and math.isfinite(want) and want):
            finding.shape, finding.cause = "not finite", f"{what} is {found:g} where one device has {want:g}."
            return
        times = found / want
        itself, square = algebra.called(times, self.sizes), algebra.called(times**2, self.sizes)
        finding.factor = times
        finding.shape = "ratio" if itself or square else "number"
        finding.cause = f"{what} is {algebra.number(times)} times what it should be ({found:.10g}, not {want:.10g})"
        finding.cause += f"; that is {itself}." if itself else "."
        if square and not itself:
            finding.cause += f" Its square is off by {square}."

    @explains("skipping", at=train_step)
    def _skipping(self, finding: Finding, lead: Difference) -> None:
        finding.shape = "decision"
        finding.cause = (
            f"one sample's loss was made not a number, where slot {self.whole.batch - 1} is: all ranks must skip the "
            f"step, and {len(finding.ranks)} of {len(self.records)} did not. The decision is not shared."
        )

    @explains("random draws", at=Randomness.draw)
    def _random_draws(self, finding: Finding, lead: Difference) -> None:
        finding.shape = "random draws"
        record = self.record_of(lead.rank)
        piece = record.draws[lead.name][0]
        twins = [
            other.rank
            for other in self.records
            if other is not record
            and any(p.tensor.shape == piece.tensor.shape and bool((p.tensor == piece.tensor).all())
                    for p in other.draws.get(lead.name, ()))
        ]  # fmt: skip
        finding.cause = f"{lead.name} is not what the same samples, positions and features draw on one device."
        if twins:
            finding.cause += f" It repeats what rank {twins[0]} drew for other elements."

    # State: what a rank held, against its part of what one device had

    @explains("initial weights", at=fill)
    def _initial_weights(self, finding: Finding, lead: Difference) -> None:
        self._held(finding, lead, self.standard.initial[lead.name], everywhere=True)
        begins = f"{lead.name} does not begin with the values that one device draws for it."
        finding.cause = f"{begins} {finding.cause}"
        cut = next((r.rows[lead.name] for r in self.records if lead.name in r.rows), (None,))[0]
        if finding.shape in VAGUE:
            finding.shape = "other values"
            if cut is not None:
                finding.cause += f"It is cut over {cut.axis}; its parts must be parts of one whole, not drawn alike."

    @explains("given gradients", at=Gradients.give)
    def _given_gradients(self, finding: Finding, lead: Difference) -> None:
        want = self.standard.expected(self.step, "given gradients", lead.name)
        self._held(finding, lead, want)
        finding.cause = f"gradients are right, and what the optimizer is given is not. {finding.cause}"
        if finding.shape in VAGUE:
            finding.shape = "update"

    @explains("moments", at=Engine.step)
    def _moments(self, finding: Finding, lead: Difference) -> None:
        self._held(finding, lead, self.standard.expected(self.step, "moments", lead.name))
        finding.cause = f"the optimizer is given the right gradients, and keeps something else of them. {finding.cause}"
        if finding.shape in VAGUE:
            finding.shape = "update"

    @explains("weights", at=Spread.updated)
    def _weights(self, finding: Finding, lead: Difference) -> None:
        self._held(finding, lead, self.standard.steps[self.step].weights[lead.name])
        if not self.whole.reference.parameters[lead.name].requires_grad:
            finding.cause = f"it is frozen, and must not change. {finding.cause}"
        else:
            finding.cause = f"gradients and moments are right: the update differs, or came to nothing. {finding.cause}"
        if finding.shape in VAGUE:
            finding.shape = "update"

    @explains("buffers", at=GlobalBatchNorm)
    def _buffers(self, finding: Finding, lead: Difference) -> None:
        want = self.standard.steps[self.step].buffers[lead.name]
        self._held(finding, lead, want, everywhere=True)
        if not want.is_floating_point():
            finding.cause = f"a number that counts what was seen is not what one device counts. {finding.cause}"
            return
        if finding.shape in VAGUE or want.numel() == 1:  # one number is always some times another
            finding.shape = "buffer"
            finding.cause = "a buffer that one device updates over all samples was updated over others, a rank's own."
        owner = self.whole.reference.model.get_submodule(lead.name.rpartition(".")[0])
        if not isinstance(owner, KINDS):
            finding.cause += (
                f" {type(owner).__name__} computes it in its forward, from the samples of one micro-batch at a time, "
                "so it depends on the layout. Weights are right as far as they do not follow from it."
            )

    @explains("weights in use", at=Bucket.finish_gather)
    def _weights_in_use(self, finding: Finding, lead: Difference) -> None:
        self._held(finding, lead, self.standard.steps[self.step].weights[lead.name])
        finding.cause = f"it is updated rightly, and the model computes with something else. {finding.cause}"
        if finding.shape in VAGUE:
            finding.shape = "stale"
            finding.cause += "After the update, weights were not gathered again, or not from all ranks."

    def _held(self, finding: Finding, lead: Difference, whole: Tensor | None, everywhere: bool = False) -> None:
        """Hypotheses about what a rank held of a tensor."""
        record, rung, weight = self.record_of(lead.rank), lead.rung, lead.name.split(" ")[0]
        found = record.state.get((rung, lead.name))
        if found is None or whole is None:
            finding.shape = "missing"
            finding.cause = "There is none." if found is None else "There should be none."
            return
        before = self.standard.expected(self.step - 1, rung, lead.name) if self.step and rung in STATES else None
        if rung == "weights" and not self.step:
            before = self.standard.initial[lead.name]
        cut = (lambda t: t) if everywhere or found.shape == whole.shape else (
            (lambda t: self.part(record, weight, t))
            if rung == "weights in use"
            else (lambda t: self.rows(record, weight, t))
        )  # fmt: skip
        want, stale = cut(whole), None if before is None else cut(before)
        if want.shape == found.shape:
            self.say_shape(finding, found.double(), want.double(), "it", None if stale is None else stale.double())
            finding.cause = f"{finding.cause[:1].upper()}{finding.cause[1:]} " if finding.cause else ""
