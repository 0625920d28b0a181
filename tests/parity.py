"""Parity: hostile tasks, an independent one-device run of them, and the comparison, tensor by tensor.

The reference is a hand-written loop over plain torch: it shares the task, the initial weights, the order of the data
and the keys of the dropout with Phalanx, and nothing of meshes, buckets, shards, batch-norm or the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import phalanx
from phalanx.data.order import Order, share
from phalanx.models.resnet import ResNet
from phalanx.models.transformer import Transformer, TransformerConfig
from phalanx.parallel.forward.wrapper import wrap
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import Moment, RandomKeys, Randomness
from phalanx.parallel.randomness.torch_checkpoint import RunOnce
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.prove.reference.coded import Coded

TOLERANCE = 1e-9
PRIME = 37


class HostileTransformer(Transformer):
    """Tied embeddings, dropout, grouped queries, prime sizes; frozen, unused and sometimes-used weights."""

    def __init__(self, layers: int, heads: int, kv_heads: int, **options: Any) -> None:
        width = 12 if heads == 2 else 2 * heads
        super().__init__(TransformerConfig(
            vocabulary=PRIME, width=width, layers=layers, heads=heads, kv_heads=kv_heads, hidden=13, dropout=0.1,
            tied=heads == 2, **options,
        ))  # fmt: skip
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if "norm" in name:
                    weight.add_(torch.randn_like(weight) * 0.1)
                elif weight.ndim >= 2:
                    weight.mul_(10)
        self.blocks[0].attention_norm.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))
        self.rare = nn.Parameter(torch.randn(width))
        self.scalar = nn.Parameter(torch.tensor(0.5))

    def forward(self, tokens: Tensor, **options: Any) -> Any:
        logits = super().forward(tokens, **options)
        special = (tokens == 7).any(1)
        if special.any():  # so it depends on a rank's samples whether this weight is used there
            logits.hidden = logits.hidden + special[:, None, None] * self.rare
        logits.hidden = logits.hidden * self.scalar
        return logits


class Sentences:
    """Documents of unequal length: ``n`` of them, so that the last batch of an epoch is short."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        source = np.random.default_rng(index)
        tokens = torch.from_numpy(source.integers(0, PRIME, size=3 + index % 7))
        targets = tokens.roll(-1).where(torch.arange(len(tokens)) % 5 < 4, -100)
        return {"tokens": tokens, "targets": targets}


@dataclass
class HostileLanguage(phalanx.Task):
    samples: int = 47
    global_batch: int = 31
    steps: int = 3
    precision: phalanx.task.Precision = "float64"
    clip: float = 0.05
    learning_rate: float = 1e-2
    warmup_steps: int = 2

    layers: int = 2
    heads: int = 2
    kv_heads: int = 1

    def model(self) -> nn.Module:
        return HostileTransformer(self.layers, self.heads, self.kv_heads)

    def data(self) -> Sentences:
        return Sentences(self.samples)

    def collate(self, samples: Any) -> dict[str, Tensor]:
        """Padded to the longest here, so the padding differs by rank and micro-batch."""
        pad = nn.utils.rnn.pad_sequence
        return {
            "tokens": pad([s["tokens"] for s in samples], batch_first=True),
            "targets": pad([s["targets"] for s in samples], batch_first=True, padding_value=-100),
        }

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"tokens": batch["tokens"]}

    def loss(self, output: Any, batch: dict[str, Tensor]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["targets"], label_smoothing=0.1, dim=-1)


@dataclass
class Mixture(HostileLanguage):
    """Experts, more than most samples have tokens for, with strong penalties."""

    capacity: float | None = None

    def model(self) -> nn.Module:
        return HostileTransformer(
            self.layers,
            self.heads,
            self.kv_heads,
            experts=8,
            capacity=self.capacity,
            balance=0.5,
            flatness=0.1,
            experts_chosen=2,
        )

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"tokens": batch["tokens"], "valid": batch["valid"]}

    def collate(self, samples: Any) -> dict[str, Tensor]:
        batch = super().collate(samples)
        lengths = torch.tensor([len(s["tokens"]) for s in samples])
        return batch | {"valid": torch.arange(batch["tokens"].shape[1]) < lengths.unsqueeze(1)}


@dataclass
class Packed(HostileLanguage):
    """Several documents in a row: masks, and positions that begin anew."""

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        time = batch["tokens"].shape[1]
        starts = (torch.arange(time) % 4 == 0).expand_as(batch["tokens"])
        place = torch.arange(time) % 4
        return {
            "tokens": batch["tokens"],
            "positions": place.expand_as(batch["tokens"]),
            "documents": starts.long().cumsum(1) - 1,
        }


class HostileResNet(ResNet):
    def __init__(self) -> None:
        super().__init__(classes=5, widths=(5, 7), depth=1, channels=3)
        self.blocks[0].conv2.weight.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(3))
        with torch.no_grad():
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.weight.normal_(1, 0.3)
                    module.bias.normal_(0, 0.3)


@dataclass
class HostileVision(phalanx.Task):
    samples: int = 47
    global_batch: int = 31
    steps: int = 3
    precision: phalanx.task.Precision = "float64"
    clip: float = 0.05
    learning_rate: float = 1e-2
    warmup_steps: int = 2
    source: np.ndarray = field(default_factory=lambda: np.random.default_rng(0).normal(3, 2, size=(47, 3, 5, 5)))

    def model(self) -> nn.Module:
        return HostileResNet()

    def data(self) -> phalanx.data.Arrays:
        return phalanx.data.Arrays(image=self.source, label=np.arange(len(self.source)) % 5)

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["image"]

    def loss(self, output: Tensor, batch: dict[str, Tensor]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["label"])


TASKS = {
    "language": HostileLanguage,
    "mixture": Mixture,
    "packed": Packed,
    "vision": HostileVision,
}


@dataclass
class Trace:
    """What a run did: by step the loss, the norm and whole gradients before clipping; at the end the weights."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    """One entry, after the last step: an error in an earlier update shows in the gradients that follow it."""
    averages: dict[str, Tensor] = field(default_factory=dict)
    """Of the weights that are trained, where a task has an EMA."""
    ready: float = 0.0
    """Seconds until the first step could begin."""


class Hand(Protocol):
    """What is other for some weights, written down once more."""

    def is_frozen(self, name: str) -> bool: ...

    def optimizers(self, weights: list[nn.Parameter]) -> Mapping[str, torch.optim.Optimizer]:
        """Each weight in a group of its own."""

    def clipped_together(self, names: list[str]) -> list[tuple[float, list[str]]]:
        """Limits, and of what norms."""

    def factor(self, step: int, name: str) -> float:
        """On the learning rate of a weight's group."""


def reference(
    task: phalanx.Task,
    micro_batches: int = 1,
    device: str = "cpu",
    trains: Callable[[int, str], bool] = lambda step, name: True,
    decay: float = 0.0,
    hand: Hand | None = None,
    coded: Coded | None = None,
    observe: Callable[[nn.Module, Randomness], None] | None = None,
) -> Trace:
    """The task on one device, by hand. ``trains``: whether a step updates a weight; ``decay``: of its average.

    ``hand``: what is other for some weights. ``coded``: what sums in few bits are. ``observe``: given the model.
    """
    blueprint = Blueprint(task.model, task.seed)
    values = {name: blueprint.value(p, "cpu").double() for name, p in blueprint.model.named_parameters()}
    model = task.model().double().to(device)
    for name, weight in model.named_parameters():
        weight.data.copy_(values[name])
    moment = Moment()
    randomness = Randomness(task.seed, moment, torch.device(device), model=model)
    randomness.answers, randomness.checkpointing = Answers(randomness), RunOnce()
    for name in task.anatomy(model).blocks:
        wrap(model.get_submodule(name), RandomKeys(name, randomness))
    if observe is not None:
        observe(model, randomness)
    for name, weight in model.named_parameters():
        weight.logical_name = name
        if hand is not None and hand.is_frozen(name):
            weight.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    made = task.optimizer(trainable) if hand is None else hand.optimizers(trainable)
    optimizers = list(made.values()) if isinstance(made, Mapping) else [made]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    data = task.data()
    order, trace = Order(len(data), task.global_batch, task.seed), Trace()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    trace.averages = {name: weight.detach().clone() for name, weight in named.items()}

    def backward(step: int, start: int, stop: int) -> tuple[float, float]:
        """Of some slots; what their loss is, and how many terms it has."""
        ids = order.ids(step, start, stop)
        batch = task.collate([data[int(i)] for i in ids])
        batch = {n: (t.double() if t.is_floating_point() else t).to(device) for n, t in batch.items()}
        moment.step, moment.slots = step, np.arange(start, stop)
        inputs = task.inputs(batch)
        with randomness.scope("task"):
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            loss = task.loss(output, batch)
        loss.total.backward()
        return loss.total.item(), float(loss.count)

    for step in range(task.steps):
        for name, weight in named.items():
            weight.requires_grad_(trains(step, name))
        if coded is None:
            parts = [backward(step, *slots) for slots in share(order.slots(step), micro_batches, 1, 0)]
        else:
            coded.begin(step, optimizers[0], named)
            with coded.computing(dict(model.named_parameters())):
                parts = _summed(coded, named, order, step, partial(backward, step))
        total, count = sum(part[0] for part in parts), sum(part[1] for part in parts)
        for weight in trainable:
            if weight.grad is not None:
                weight.grad.div_(count)
        trace.gradients.append(_kept({n: p.grad for n, p in named.items()}))
        if hand is None:
            trace.norms.append(norm := float(nn.utils.clip_grad_norm_(trainable, task.clip)))
        else:
            trace.norms.append(float(nn.utils.get_total_norm([p.grad for p in trainable if p.grad is not None])))
            for limit, names in hand.clipped_together(list(named)):
                nn.utils.clip_grad_norm_([named[name] for name in names], limit)
        trace.losses.append(total / count)
        for group, rate in zip(groups, rates, strict=True):
            factor = task.schedule()(step) if hand is None else hand.factor(step, group["params"][0].logical_name)
            group["lr"] = rate * factor
        if coded is None:
            for optimizer in optimizers:
                optimizer.step()
        else:
            factor = min(1.0, task.clip / (norm + 1e-6))
            coded.update(optimizers[0], named, dict.fromkeys(named, factor), count)
            coded.end_step(counts=True, without={name for name, weight in named.items() if weight.grad is None})
        model.zero_grad()
        for name, weight in named.items():
            trace.averages[name] = decay * trace.averages[name] + (1 - decay) * weight.detach()
    tied = {n for n, _ in model.named_parameters(remove_duplicate=False)} - {n for n, _ in model.named_parameters()}
    trace.weights.append(_kept({n: t for n, t in model.state_dict().items() if n not in tied}))
    return trace


def _summed(
    coded: Coded,
    named: dict[str, nn.Parameter],
    order: Order,
    step: int,
    backward: Callable[[int, int], tuple[float, float]],
) -> list[tuple[float, float]]:
    """Have the gradients that all senders' sums are, and what their losses are."""
    losses: list[tuple[float, float]] = []
    sums: dict[str, Tensor] = {}
    touched: set[str] = set()
    for turn in coded.turns(order, order.ids(step)):
        every = []
        for ranges in turn:
            losses += [backward(start, stop) for start, stop in ranges if start < stop]
            every.append({n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named.items()})
            touched |= {name for name, weight in named.items() if weight.grad is not None}
            for weight in named.values():
                weight.grad = None
        for name, total in coded.sum(every).items():
            sums[name] = total.detach() + sums.get(name, 0)
    for name in touched:
        named[name].grad = sums[name]
    return losses


def _kept(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: None if tensor is None else tensor.detach().cpu().clone() for name, tensor in tensors.items()}


class Summed(phalanx.Callback):
    """Tells the summed gradients, whole, in every step."""

    def __init__(self, tell: Callable[[dict[str, Any]], object]) -> None:
        self.tell = tell

    def on_gradients(self, engine: phalanx.Engine, divisor: float, without: set[str]) -> None:
        self.tell(engine.whole_gradients(divisor, without))


def spread_run(
    task: phalanx.Task, layout: phalanx.Layout, device: str = "cpu", method_of: Callable[[int], str] | None = None
) -> Trace:
    """The task under a layout, on the ranks of this process group.

    ``method_of``: by step, what ``comm=auto`` chooses.
    """
    trace, started = Trace(), time.monotonic()
    with phalanx.Engine(task, layout, device=device) as engine:
        trace.ready = time.monotonic() - started
        engine.callbacks.add(Summed(lambda whole: trace.gradients.append(_kept(whole))))
        for batch in engine.batches():
            if method_of is not None:
                engine.auto_comm.follow(method_of(batch.step))
            metrics = engine.step(batch)
            assert not metrics.skipped
            trace.losses.append(metrics.loss)
            trace.norms.append(metrics.grad_norm)
        trace.weights.append(_kept(engine.whole_weights()))
        for tensors in engine.callbacks.tensors().values():
            trained = [name for name, trainable in engine.spread.trainable.items() if trainable]
            trace.averages = _kept({n: t for n, t in engine.spread.whole.state(tensors) if n in trained})
    return trace


def sent_along(axis: str, task: phalanx.Task, layout: str) -> int:
    """Bytes that this rank sends in a step along an axis."""
    with phalanx.Engine(task, phalanx.Layout.parse(layout), device="cpu") as engine:
        batches = engine.batches()
        engine.step(next(batches))  # and the probe
        before = engine.traffic.start_step()
        engine.step(next(batches))
        return engine.traffic.sent_since(before)[axis]


def difference(found: Trace, expected: Trace) -> tuple[float, str]:
    """The worst norm-relative error of any tensor in any step, and where it is."""
    worst = (0.0, "")

    def note(error: float, where: str) -> None:
        nonlocal worst
        worst = max(worst, (math.inf if math.isnan(error) else error, where))

    assert len(found.losses) == len(expected.losses)
    for step, (a, b) in enumerate(zip(found.losses, expected.losses, strict=True)):
        note(abs(a - b) / abs(b), f"loss, step {step}")
    for step, (a, b) in enumerate(zip(found.norms, expected.norms, strict=True)):
        note(abs(a - b) / abs(b), f"gradient norm, step {step}")
    for kind in ("gradients", "weights"):
        for step, (mine, theirs) in enumerate(zip(getattr(found, kind), getattr(expected, kind), strict=True)):
            assert mine.keys() == theirs.keys(), (kind, step, mine.keys() ^ theirs.keys())
            scale = max(float(t.norm()) for t in theirs.values() if t is not None and t.is_floating_point())
            for name, want in theirs.items():
                have = mine[name]
                assert (have is None) == (want is None), (
                    f"{kind} of {name} in step {step}: {have is None}, {want is None}"
                )
                if want is not None and want.is_floating_point():
                    size = float(want.norm()) or scale
                    note(float((have - want).norm()) / size, f"{kind} of {name}, step {step}")
    return worst
