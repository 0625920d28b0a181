"""What the shape of a tensor's error says of its cause: of activations, and of gradients before and after their sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from phalanx.parallel.axes import batchnorm
from phalanx.parallel.axes.cuts import make_plan
from phalanx.prove.explanation import algebra
from phalanx.prove.explanation.finding import Finding
from phalanx.prove.explanation.rungs import explains
from phalanx.prove.explanation.scene import SUMS, Scene, own_rows
from phalanx.prove.explanation.sites import BACKWARD, location, loss_site
from phalanx.prove.ladder import Difference, off, size
from phalanx.prove.ranks.pieces import Piece
from phalanx.prove.ranks.record import WHOLE, Record, WholeStep, bare, by_axis, module_named


class Causes(Scene):
    """Holds hypotheses against tensors."""

    @explains("activations")
    def _activations(self, finding: Finding, lead: Difference) -> None:
        module = module_named(self.whole.reference.model, lead.name)
        record = self.record_of(lead.rank)
        whole, pieces = self.whole.activations[lead.name], record.activations[lead.name]
        index = max(range(len(pieces)), key=lambda i: self.piece_error(pieces[i], whole))
        pair = pieces[index].beside(whole, self.whole.batch)
        assert pair is not None
        found, want = pair
        before = f"the first module whose output differs is {lead.name} ({type(module).__name__})."
        self._weights_at_call(finding, record, lead.name)
        if finding.cause:
            finding.cause = f"{before} {finding.cause}"
            return
        if isinstance(module, batchnorm.KINDS):
            finding.shape = "batch statistics"
            finding.cause = f"{before} It must normalise by the samples of all ranks, and has those of its own."
            return
        self.say_shape(finding, found, want, "its output", self._stale(lead.name, pieces[index]))
        for name, parameter in self._parameters(lead.name) if not finding.cause else ():
            added = (found - want).reshape(-1, found.shape[-1])
            times = algebra.ratio(added[0] + parameter, parameter) if added[0].shape == parameter.shape else None
            if times is not None and algebra.same(added, added[:1].expand_as(added)):
                finding.shape, finding.factor = "added again", times
                finding.cause = (
                    f"its {name} is added {algebra.number(times)} times: once on each rank before a sum over ranks, "
                    "where it must be added once after it."
                )
        for axis in self.sizes if not finding.cause else ():
            others = [r for r in by_axis(self.records, record.rank, [axis]) if lead.name in r.activations]
            parts = [r.activations[lead.name][index].tensor for r in others if index < len(r.activations[lead.name])]
            alike = len(parts) > 1 and all(p.shape == parts[0].shape for p in parts)
            if alike and algebra.same(torch.stack(parts).sum(0).view_as(found), want):
                finding.shape = "missing sum"
                finding.cause = f"the sum of what ranks of {axis} have is right: a sum over {axis} is missing."
        self._other_samples(finding, pieces[index], whole)
        finding.cause = f"{before} {finding.cause or self.nothing_simple(finding)}"

    def _weights_at_call(self, finding: Finding, record: Record, name: str) -> None:
        """Whether a module was called with other weights than it should have."""
        weights = self.standard.steps[self.step - 1].weights if self.step else self.standard.initial
        for weight, found in record.used.get(bare(name), {}).items():
            if weight not in weights or weight not in record.rows:
                continue
            want = self.part(record, weight, weights[weight])
            if off(found, want, size(want), 0.0) > self.bar:
                older = self.standard.initial if self.step < 2 else self.standard.steps[self.step - 2].weights
                stale = self.part(record, weight, older[weight]) if self.step else None
                self.say_shape(finding, found, want, f"{weight}, with which it was called,", stale)
                finding.shape = finding.shape or "other weights"
                finding.cause = finding.cause or f"{weight}, with which it was called, is not what it should be."
                finding.affected = [weight, *finding.affected]
                return

    def _other_samples(self, finding: Finding, piece: Piece, whole: Tensor) -> None:
        """Whether a tensor is what other samples of the step give."""
        for record in self.records if not finding.cause else ():
            for number, slots in enumerate(record.slots):
                pair = replace(piece, slots=slots).beside(whole, self.whole.batch)
                if len(slots) == len(piece.slots) and pair is not None and algebra.same(*pair):
                    finding.shape = "other samples"
                    finding.cause = (
                        f"it is what slots {slots.tolist()} give, micro-batch {number} of rank {record.rank}, and not "
                        f"its own, {piece.slots.tolist()}."
                    )
                    return

    def _parameters(self, module: str) -> Iterator[tuple[str, Tensor]]:
        """A module's own weights, as this step began with them."""
        weights = self.standard.steps[self.step - 1].weights if self.step else self.standard.initial
        for name, weight in weights.items():
            owner, _, attribute = name.rpartition(".")
            if owner == bare(module):
                yield attribute, weight

    def _stale(self, name: str, piece: Piece) -> Tensor | None:
        """What a module would give with the weights from before the last update."""
        if not self.step:
            return None
        weights = self.standard.initial if self.step == 1 else self.standard.steps[self.step - 2].weights
        known = {name: weight for name, weight in weights.items() if name in self.whole.reference.parameters}
        before = WholeStep.of(self.task, self.whole.reference.micro_batches, self.step, known)
        pair = piece.beside(before.activations[name], self.whole.batch)
        return pair[1] if pair else None

    @explains("gradients of activations")
    def _gradients_of_activations(self, finding: Finding, lead: Difference) -> None:
        module = module_named(self.whole.reference.model, lead.name)
        record = self.record_of(lead.rank)
        whole, pieces = self.whole.backward[lead.name], record.backward[lead.name]
        for axes in SUMS if not finding.shape else ():
            sums = [self.added_up(record, lead.name, index, axes) for index in range(len(pieces))]
            pairs = [pair for piece in sums if (pair := piece.beside(whole, self.whole.batch))]
            found, want = max(pairs, key=lambda p: off(p[0], p[1], size(whole), 0.0))
            if not finding.shape:
                self.say_shape(finding, found, want, "the gradient")
            if finding.shape == "ratio":
                self._ratios(finding, sums, pairs)
        if not finding.shape:
            self._penalties(finding, lead.name, pieces)
        worst = max(pieces, key=lambda piece: self.piece_error(piece, whole))
        self._other_samples(finding, worst, whole)
        if not finding.cause and self.partial is not None:
            before, axes = self.partial
            over = " and ".join(axes)
            finding.shape = "missing sum"
            finding.cause = (
                f"in front of it, at {before}, ranks of {over} each have a part of the gradient, and the parts add up "
                f"to the right one: between the two, a sum over {over} is missing."
            )
        if bare(lead.name) == WHOLE:
            finding.where = loss_site(finding.axes, self.task)
            finding.cause = (
                f"forward is right, and what backward begins with is not: {finding.cause or 'see the loss.'}"
            )
            return
        finding.where = self._collective(finding.axes)
        finding.cause = (
            f"forward is right; in backward the first gradient that differs is that of the output of {lead.name} "
            f"({type(module).__name__}), so what comes after it sends back something wrong: "
            f"{finding.cause or self.nothing_simple(finding)}"
        )

    def _collective(self, axes: Sequence[str]) -> str:
        """Where what a block sends back crosses ranks."""
        how, reference = axes[0] if axes else "", self.whole.reference
        if how == "tp" and make_plan(reference.model, reference.anatomy, self.layout.tp).sequence_parallel:
            how = "tp by time"
        elif how == "cp":
            how = f"cp {self.layout.cp_kind}"
        return location(BACKWARD[how]) if how in BACKWARD else ""

    def _ratios(self, finding: Finding, pieces: Sequence[Piece], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """One ratio, or one for each micro-batch."""
        times = [1.0 if algebra.same(*pair) else algebra.ratio(*pair) for pair in pairs]
        known = {round(t, 9) for t in times if t is not None}
        if len(known) > 1 and None not in times:
            told = [
                f"{algebra.number(t)} of slots {p.slots.tolist()}" for t, p in zip(times, pieces, strict=False) if t
            ]
            finding.shape, finding.factor = "ratios", None
            finding.cause = f"the gradient is scaled by micro-batch: times {', '.join(told)}."

    def _penalties(self, finding: Finding, name: str, pieces: Sequence[Piece]) -> None:
        """Whether what is bound to the stream by `losses.penalised` counts more or less than once."""
        double = WholeStep.of(self.task, self.whole.reference.micro_batches, self.step, penalties=2.0).backward[name]
        for piece in pieces:
            pair = piece.beside(self.whole.backward[name], self.whole.batch)
            other = piece.beside(double, self.whole.batch)
            if pair is None or other is None:
                continue
            (found, want), penalty = pair, other[1] - pair[1]
            if not float(penalty.norm()):
                continue
            times = 1 + float(((found - want) * penalty).sum() / penalty.square().sum())
            if algebra.same(found, want + (times - 1) * penalty):
                word = algebra.called(times, self.sizes)
                finding.shape, finding.factor = "penalties", times
                finding.cause = f"penalties count {algebra.number(times)} times{f', which is {word}' if word else ''}."
                return

    @explains("gradients before reduction")
    def _gradients_before_reduction(self, finding: Finding, lead: Difference) -> None:
        whole = self.standard.steps[self.step].gradients[lead.name]
        assert whole is not None
        record = self.record_of(lead.rank)
        axes = tuple(axis for axis in record.coordinates if axis not in ("cp", "tp"))
        total = self.sum_of_own(record, lead.name, axes)
        want = self.part(record, lead.name, whole) * self.standard.steps[self.step].count
        if total is not None:
            self.say_shape(finding, total, want, "what ranks' backwards made, added up,")
            self._by_sample(finding, record, lead.name, own_rows(total, record.rows[lead.name][2:]))
        if not finding.cause:
            finding.cause = f"what backward makes of {lead.name} is wrong before ranks add it up."

    @explains("gradients")
    def _gradients(self, finding: Finding, lead: Difference) -> None:
        whole = self.standard.steps[self.step].gradients[lead.name]
        record = self.record_of(lead.rank)
        found = record.summed.get(lead.name)
        if whole is None or found is None:
            finding.shape = "missing"
            finding.cause = "one of them has a gradient there, and the other has none."
            return
        count = self.standard.steps[self.step].count
        needed = self.needed(record, lead.name, whole * count)
        for axes in self.subsets():
            total = self.sum_of_own(record, lead.name, axes)
            rows = None if total is None else own_rows(total, record.rows[lead.name][2:])
            if rows is None or needed is None or not algebra.same(found * count, rows):
                continue
            missing = [axis for axis in needed if axis not in axes]
            if missing:
                finding.shape, finding.axes = "missing sum", missing
                finding.cause = (
                    f"each rank has its own part, and the parts add up to one device's gradient over "
                    f"{' and '.join(missing)}: a sum over {' and '.join(missing)} is missing."
                )
                return
        self.say_shape(finding, found, self.rows(record, lead.name, whole), "the gradient")
        if finding.shape == "ratio" and needed is not None:
            finding.cause += " What each rank made is right: it is scaled, or summed once too often, afterwards."
        self._by_sample(finding, record, lead.name, found * count)

    def _by_sample(self, finding: Finding, record: Record, name: str, found: Tensor) -> None:
        """How often each sample is in a gradient: alike for a rank's micro-batches, or each by itself."""
        reference = self.whole.reference
        if finding.cause or reference.couples_samples or reference.at_once:
            return
        fresh = type(reference)(self.task, reference.micro_batches).run(self.step)
        rows = [self.rows(record, name, g[name]) for g in fresh.gradients_by_slot(self.step)]
        if rows[0].shape != found.shape:
            return
        groups = {
            (r.rank, number): [int(slot) for slot in slots]
            for r in self.records
            if not any(r.coordinates[axis] for axis in ("cp", "tp", "pp"))
            for number, slots in enumerate(r.slots)
        }
        basis = [torch.stack([rows[slot] for slot in slots]).sum(0) for slots in groups.values()]
        times = algebra.coefficients(found, basis)
        finding.shape = "some samples" if times is not None else ""
        if times is not None:
            counted = dict(zip(groups, [round(t, 6) for t in times.tolist()], strict=True))
            self._say_counted(finding, {k: t for k, t in counted.items() if float(basis[list(groups).index(k)].norm())})
            return
        alone = [slot for slot, row in enumerate(rows) if float(row.norm())]
        times = algebra.coefficients(found, [rows[slot] for slot in alone])
        if times is not None:
            told = ", ".join(f"{slot}: {algebra.number(t)}" for slot, t in zip(alone, times.tolist(), strict=True))
            finding.shape = "some samples"
            finding.cause = f"samples count unequally, by slot {told}, where each must count once."

    def _say_counted(self, finding: Finding, counted: dict[tuple[int, int], float]) -> None:
        """``counted`` says how often each micro-batch of each rank is in a sum."""
        dropped = sorted(key for key, times in counted.items() if times == 0)
        by_micro = {number: {t for (_, n), t in counted.items() if n == number} for _, number in counted}
        by_rank = {rank: {t for (r, _), t in counted.items() if r == rank} for rank, _ in counted}
        if dropped and set(counted.values()) <= {0.0, 1.0}:
            told = ", ".join(f"{number} of rank {rank}" for rank, number in dropped)
            finding.cause = f"of the step's samples, some do not count: micro-batch {told}."
        elif all(len(times) == 1 for times in by_micro.values()) and len(by_micro) > 1:
            told = ", ".join(f"{n}: {algebra.number(min(t))} times" for n, t in sorted(by_micro.items()))
            finding.cause = f"micro-batches count unequally on every rank ({told}), where each must count once."
        elif all(len(times) == 1 for times in by_rank.values()) and len(by_rank) > 1:
            told = ", ".join(f"{r}: {algebra.number(min(t))} times" for r, t in sorted(by_rank.items()))
            finding.cause = (
                f"ranks count unequally ({told}), where each must count once: something was divided by, or clipped to, "
                "what a rank has alone."
            )
        else:
            told = ", ".join(f"{n} of rank {r}: {algebra.number(t)}" for (r, n), t in sorted(counted.items()))
            finding.cause = f"micro-batches count unequally ({told}), where each must count once."

    def say_shape(self, finding: Finding, found: Tensor, want: Tensor, what: str, stale: Tensor | None = None) -> None:
        """The simplest hypothesis that explains a tensor."""
        times = algebra.ratio(found, want)
        dim = algebra.reordered(found, want) if times is None and found.numel() < 1 << 20 else None
        if not bool(torch.isfinite(found).all()) and bool(torch.isfinite(want).all()):
            finding.shape, finding.cause = "not finite", f"{what} is not a number in places."
        elif not float(found.norm()) and float(want.norm()):
            finding.shape, finding.factor, finding.cause = "missing", 0.0, f"{what} is zero."
        elif stale is not None and algebra.same(found, stale):
            finding.shape = "stale"
            finding.cause = f"{what} is what it was a step before: an update has not reached it."
        elif times is not None:
            name = algebra.called(times, self.sizes)
            finding.shape, finding.factor = "ratio", times
            finding.cause = f"{what} is {algebra.number(times)} times what it should be"
            finding.cause += f", which is {name}." if name else "."
        elif dim is not None:
            finding.shape, finding.cause = "reordered", f"{what} has the right rows in another order, along dim {dim}."
        elif (few := algebra.single(found, want)) is not None:
            finding.shape = "single elements"
            finding.cause = (
                f"{what} is wrong in {few} of {found.numel()} elements and right in all others: no rule of a layout "
                "does that; a kernel, a race or a faulty device does."
            )
        elif (dtype := algebra.precision(found, want)) is not None:
            finding.shape = "precision"
            finding.cause = f"{what} is off by what {dtype} rounds: it went through a lower precision."

    @staticmethod
    def nothing_simple(finding: Finding) -> str:
        over = f" under {' and '.join(finding.axes)}" if finding.axes else ""
        return f"it differs{over} by no simple factor, sum or order."
