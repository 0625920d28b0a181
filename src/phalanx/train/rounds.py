"""Losses that need all micro-batches of a step at the same time, where a rank computes them one after another.

The model runs once without a graph, and its outputs are kept. The loss is made of all of them, in rounds: each goes as
far as the next thing that it gathers, which then is known. What comes back to the outputs is kept as well, and the
model runs a second time, a micro-batch at a time: that is what its backward begins with. So no more than one
micro-batch's activations are held, and the gradient is that of the whole batch (gradient caching).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from phalanx.data.loader import Loader, StepBatch
from phalanx.errors import WrongUse
from phalanx.logits import Logits
from phalanx.losses import Loss
from phalanx.parallel.axes.samples import Asked, AtOnce, LossAnswers
from phalanx.parallel.axes.schedules import Action
from phalanx.train.step import (
    Metrics,
    call,
    compute,
    copies,
    independent,
    micro_batch,
    put_back,
    task_loss,
    train_step,
)
from phalanx.trees import ends, mapped

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

PLAIN = (Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)


def step(engine: Engine, batch: StepBatch) -> Metrics:
    """One training step; where its loss turns out to need all micro-batches at once, from its beginning again."""
    samples = engine.spread.samples
    several = len(batch.micro_batches) > 1
    samples.start(engine.task.turn(batch.step), len(batch.micro_batches), partial(engine.loader.spans, batch.step))
    if not (several and samples.known.all_at_once):
        before = copies(engine.spread.model) if several and samples.repeats else []
        try:
            return train_step(engine, batch)
        except AtOnce:
            put_back(before)
            engine.spread.parts.clear()
            engine.spread.rest()
    return train_step(engine, batch, Rounds(engine, batch, partial(task_loss, engine)))


class Measured:
    """What a function makes of each micro-batch of a batch, without gradients."""

    def __init__(self, engine: Engine, loader: Loader, batch: StepBatch, finish: Callable[..., Any]) -> None:
        self.engine, self.batch, self._measure = engine, batch, finish
        self._rounds: Rounds | None = None
        engine.spread.samples.start(None, len(batch.micro_batches), partial(loader.spans, batch.step))

    def __call__(self, action: Action) -> Any:
        engine, micro = self.engine, self.batch.micro_batches[action.micro]
        if not engine.spread.samples.known.all_at_once or len(self.batch.micro_batches) == 1:
            try:
                return compute(engine, self.batch.step, micro, action, self.finish)
            except AtOnce:
                engine.spread.rest()
        if self._rounds is None:
            self._rounds = Rounds(engine, self.batch, self.finish)
        return self._rounds.results[action.micro]

    def finish(self, output: Any, tensors: dict[str, Any]) -> Any:
        found = self._measure(output, tensors)
        self.engine.spread.samples.ended()
        return found


class Rounds:
    """The micro-batches of one step, each with its output and what was made of it."""

    def __init__(self, engine: Engine, batch: StepBatch, finish: Callable[..., Any]) -> None:
        """Run the model over all of them, and find out what ``finish`` gathers."""
        self.engine, self.batch, self.finish = engine, batch, finish
        self.outputs: list[Any] = []
        self.draws: list[int] = []
        """By micro-batch, how many draws the model made before the loss."""
        self.known: list[Tensor] = []
        self.own: list[Tensor] = []
        self.results: list[Any] = []
        with torch.no_grad():
            self._run_model()
            while not self._round():
                pass

    def _run_model(self) -> None:
        spread = self.engine.spread
        before = copies(spread.model)
        with spread.moment.recompute({}):
            for action in spread.forwards(len(self.batch.micro_batches)):
                spread.begin(action)
                micro = self.batch.micro_batches[action.micro]
                with micro_batch(self.engine, self.batch.step, micro) as tensors, spread.samples.computed():
                    self.outputs.append(rebuilt(call(self.engine, tensors), _kept))
                    self.draws.append(spread.randomness.calls)
        put_back(before)
        spread.rest()

    def _round(self) -> bool:
        """The loss of each micro-batch as far as it goes; whether it came to its end."""
        asked: list[Asked] = []
        self.results = []
        for number in range(len(self.outputs)):
            try:
                self.results.append(self._made(number, self.outputs[number], LossAnswers(self.known)))
            except Asked as question:
                asked.append(question)
        if not asked:
            return True
        if self.results or len({question.kind for question in asked}) > 1:
            raise unlike("in some micro-batches and not in others")
        real = [q.value for q, micro in zip(asked, self.batch.micro_batches, strict=True) if micro.real]
        with torch.enable_grad():
            every, own = self.engine.spread.samples.together(asked[0].kind, real, asked[0].value)
        self.known.append(every)
        self.own.append(own)
        return False

    def _made(self, number: int, output: Any, answers: LossAnswers) -> Any:
        spread, micro = self.engine.spread, self.batch.micro_batches[number]
        with micro_batch(self.engine, self.batch.step, micro) as tensors, spread.samples.computed():
            spread.randomness.calls = self.draws[number]
            with spread.samples.in_loss(answers):
                return self.finish(output, tensors)

    def differentiate(self, scale: float) -> None:
        """Find what comes back to every output from all losses, ``scale`` times."""
        self.scale = scale
        answers: list[LossAnswers] = []
        leaves: list[list[Tensor]] = []
        objectives: list[Tensor] = []
        for number, output in enumerate(self.outputs):
            answers.append(LossAnswers(self.known))
            leaves.append([])
            try:
                loss = self._made(number, rebuilt(output, partial(_leaf, leaves[-1])), answers[-1])
            except Asked:
                raise unlike("more where gradients are computed than without them") from None
            if not loss.total.requires_grad:
                raise independent(self.engine.task)
            objectives.append(loss.total * scale)
        real = [number for number, micro in enumerate(self.batch.micro_batches) if micro.real]
        for index in reversed(range(len(self.known))):
            if any(index in answer.given for answer in answers):
                self._through(index, real, answers, objectives)
        for number in real:
            objectives[number].backward()
        self.gradients = [[leaf.grad for leaf in own] for own in leaves]
        self.outputs.clear()

    def _through(self, index: int, real: list[int], answers: list[LossAnswers], objectives: list[Tensor]) -> None:
        """What comes back to one thing that was gathered joins what each of its samples is differentiated by."""
        every, own = self.known[index], self.own[index]
        back = torch.zeros_like(every, dtype=torch.promote_types(every.dtype, torch.float32))
        for number in real:
            told = answers[number].given[index][1]
            (found,) = torch.autograd.grad(objectives[number], told, retain_graph=True, allow_unused=True)
            back += 0 if found is None else found
        (summed,) = torch.autograd.grad(every, own, back.to(every.dtype)) if every is not own else (back,)
        begin = 0
        for number in real:
            value, _ = answers[number].given[index]
            objectives[number] = objectives[number] + (value * summed[begin : begin + len(value)]).sum()
            begin += len(value)

    def backward_begins(self, number: int, output: Any, tensors: Any) -> Loss:
        """A micro-batch's loss in the model's second run: a sum with the gradient that is known."""
        found: list[Tensor] = []
        rebuilt(output, partial(_noted, found))
        terms = [
            (tensor.to(wide) * (gradient.to(wide) / self.scale)).sum()
            for tensor, gradient in zip(found, self.gradients[number], strict=True)
            if gradient is not None and tensor.requires_grad
            for wide in [torch.promote_types(tensor.dtype, torch.float32)]
        ]
        terms = terms or [tensor.sum() * 0 for tensor in found if tensor.requires_grad]
        if not terms:
            raise independent(self.engine.task)
        return Loss(torch.stack([term.to(terms[0].dtype) for term in terms]).sum(), 1)


def unlike(how: str) -> WrongUse:
    """What is told where micro-batches do not gather the same things."""
    return WrongUse(
        f"Task.loss gathers {how}. Gather the same things in the same order, whatever the samples are, with gradients "
        "and without."
    )


def _kept(tensor: Tensor) -> Tensor:
    """A copy, since weights, which a model may give as well, come and go."""
    return tensor.detach().clone()


def _leaf(found: list[Tensor], tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    found.append(tensor.detach().requires_grad_())
    return found[-1].view_as(tensor)  # which a loss may change in place


def _noted(found: list[Tensor], tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        found.append(tensor)
    return tensor


def rebuilt(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A model's output with its tensors changed, whatever holds them; what cannot be looked into is refused."""
    for end in ends(output):
        if not isinstance(end, (*PLAIN, Logits)):
            raise WrongUse(
                f"the loss needs all micro-batches at once, and the model gives a {type(end).__name__}, which cannot "
                "be kept from one to the next. Return tensors, or tuples or dicts of them; or leave micro_batch out "
                "of the layout."
            )
    return mapped(partial(_changed, change), output, (Tensor, Logits))


def _changed(change: Callable[[Tensor], Tensor], leaf: Tensor | Logits) -> Tensor | Logits:
    """Logits stay `Logits`, of which a loss knows where the classes are."""
    return leaf.computed(change(leaf.tensor())) if isinstance(leaf, Logits) else change(leaf)
