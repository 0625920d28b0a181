"""Mistakes that people make, each planted in a small task. The line that a message must name ends in ``# here``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.data import Arrays


@dataclass
class Points(phalanx.Task):
    """Nothing is wrong with this one: points in three classes."""

    global_batch: int = 16
    steps: int = 4
    warmup_steps: int = 1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def points(self, count: int, seed: int) -> Arrays:
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
        return Arrays(x=x, y=x[:, :3].argmax(1))

    def data(self) -> Any:
        return self.points(64, 0)

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["x"]

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, batch["y"])


MISTAKES: dict[type[Points], str] = {}
"""Each with words of its message."""
LIKELY: set[type[Points]] = set()
"""Those that are a warning, not a refusal."""


def mistake(words: str, likely: bool = False) -> Callable[[type[Points]], type[Points]]:
    def note(kind: type[Points]) -> type[Points]:
        kind = dataclass(kind)
        MISTAKES[kind] = words
        if likely:
            LIKELY.add(kind)
        return kind

    return note


# Losses.


@mistake("a mean and a count of 1")
class MeanAndOne(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        return phalanx.Loss(F.cross_entropy(output, batch["y"]), 1)  # here


@mistake("is a mean over the batch, not a sum")
class MeanNotSum(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        mean = F.cross_entropy(output, batch["y"])  # here
        return phalanx.Loss(mean, len(output))


@mistake("count of CountOfOne.loss is not that of its terms")
class CountOfOne(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        return phalanx.Loss(F.cross_entropy(output, batch["y"], reduction="sum"), 1)  # here


@mistake("count of CountOfSettings.loss is not that of its terms")
class CountOfSettings(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        total = F.cross_entropy(output, batch["y"], reduction="sum")
        return phalanx.Loss(total, self.global_batch)  # here


@mistake("phalanx.gather(x) gives the rows of the whole global batch")
class Contrastive(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        near = F.normalize(output, dim=1)
        scores = near @ near.T  # here
        return phalanx.Loss(F.cross_entropy(scores, torch.arange(len(scores)), reduction="sum"), len(scores))


@mistake("depends on which samples are computed together")
class WeightsOfTheBatch(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        counts = torch.bincount(batch["y"], minlength=3)
        weights = len(output) / (3 * counts + 1)  # here
        return phalanx.Loss(F.cross_entropy(output, batch["y"], weights.to(output), reduction="sum"), len(output))


@mistake("depends on which samples are computed together")
class Broadcast(Points):
    def model(self) -> nn.Module:
        return nn.Linear(4, 1)

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        error = output - batch["y"]  # here
        return phalanx.Loss(error.square().sum(), len(output))


@mistake("does not depend on any trainable weight")
class Detached(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        total = F.cross_entropy(output.detach(), batch["y"], reduction="sum")
        return phalanx.Loss(total, len(output))  # here


@mistake("has a total of shape float")
class Item(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        total = F.cross_entropy(output, batch["y"], reduction="sum").item()
        return phalanx.Loss(total, len(output))  # type: ignore[arg-type]  # here


@mistake("returned a tensor, which has no count")
class PlainTensor(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        return F.cross_entropy(output, batch["y"])  # here


@mistake("calls backward() itself")
class BackwardInLoss(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:  # here
        found = phalanx.losses.cross_entropy(output, batch["y"])
        found.total.backward(retain_graph=True)
        return found


class Decays(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:  # here: UpdatesInForward
        with torch.no_grad():
            self.weight.mul_(0.99)
        return super().forward(x)


@mistake("weight changes while a loss is computed")
class UpdatesInForward(Points):
    def model(self) -> nn.Module:
        return Decays(4, 3)


@mistake("counts targets that it leaves out")
class IgnoredAreCounted(Points):
    def data(self) -> Any:
        points = self.points(64, 0).columns
        return Arrays(x=points["x"], y=points["y"].where(torch.arange(64) % 3 > 0, -100))

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        total = F.cross_entropy(output, batch["y"], reduction="sum")
        return phalanx.Loss(total, batch["y"].numel())  # here


@mistake("counts targets that it leaves out")
class PaddingIsCounted(Points):
    def data(self) -> Any:
        y = self.points(64, 0).columns["y"]
        return Arrays(x=self.points(64, 0).columns["x"], y=torch.stack([y, (y + 1) % 3, y * 0], 1))

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 9), nn.Unflatten(1, (3, 3)))

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        total = F.cross_entropy(output.flatten(0, 1), batch["y"].flatten(), ignore_index=0, reduction="sum")
        return phalanx.Loss(total, batch["y"].numel())  # here


@mistake("an id or a label that is out of range")
class LabelsFromOne(Points):
    def data(self) -> Any:
        points = self.points(64, 0).columns
        return Arrays(x=points["x"], y=points["y"] + 1)

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, batch["y"])  # here


@mistake("loss of the first batch is nan")
class LogOfZero(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        chosen = output.relu().gather(1, batch["y"][:, None])
        return phalanx.Loss((chosen * 0 * chosen.log()).sum(), len(output))  # here


@mistake("the gradient of 0.weight is not")
class RootOfZero(Points):
    def model(self) -> nn.Module:  # here
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        same = (output - output).square().sum(1).sqrt().sum()
        return phalanx.Loss(same + F.cross_entropy(output, batch["y"], reduction="sum"), len(output))


@mistake("cross_entropy is given probabilities", likely=True)
class SoftmaxTwice(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))

    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, batch["y"])  # here


@mistake("binary_cross_entropy_with_logits is given probabilities", likely=True)
class SigmoidTwice(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        wanted = F.one_hot(batch["y"], 3).to(output)
        return phalanx.losses.binary_cross_entropy(output.sigmoid(), wanted)  # here


@mistake("cross_entropy is given targets that add up to 1 over dim -1, and not over dim 1", likely=True)
class ProbabilitiesInTheLastDim(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        wanted = F.one_hot(batch["y"], 3).to(output).unsqueeze(1)
        return phalanx.losses.cross_entropy(output.unsqueeze(1).expand(-1, 2, -1), wanted.expand(-1, 2, -1))  # here


@mistake("kl_div is given numbers above 0", likely=True)
class NoLogSoftmaxInKL(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        return phalanx.losses.kl_div(output, F.one_hot(batch["y"], 3).to(output))  # here


@mistake("nll_loss is given numbers above 0", likely=True)
class NoLogSoftmax(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        return phalanx.Loss(F.nll_loss(output, batch["y"], reduction="sum"), len(output))  # here


# Models.


class OverTheBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        centred = hidden - hidden.mean(0)  # here: BatchStatistic
        return self.last(centred.relu())


@mistake("mixes samples: a sample gives something else when others are in its batch")
class BatchStatistic(Points):
    def model(self) -> nn.Module:
        return OverTheBatch()


class Noisy(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 3)
        self.source = torch.Generator().manual_seed(0)
        self.numbers = np.random.default_rng(0)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:  # here: EvalInForward
        if self.kind == "generator":
            x = x + torch.randn(x.shape, generator=self.source)  # here: OwnGenerator
        if self.kind == "numpy":
            x = x + torch.from_numpy(np.random.normal(size=x.shape)).to(x)  # here: NumpyInForward
        if self.kind == "numpy's own":
            x = x * float(self.numbers.normal())  # here: NumpyGenerator
        if self.kind == "python":
            x = x * random.random()  # here: PythonInForward
        if self.kind == "order":
            x = x[:, torch.randperm(4)]  # here: OrderInForward
        if self.kind == "counts":
            self.calls += 1
            x = x / self.calls  # here: CountsCalls
        if self.kind == "eval":
            self.eval()
        return self.linear(x)


@mistake("is not deterministic: a batch computed twice")
class OwnGenerator(Points):
    def model(self) -> nn.Module:
        return Noisy("generator")


@mistake("drew random numbers whose values would depend on how the job is spread")
class NumpyInForward(Points):
    def model(self) -> nn.Module:
        return Noisy("numpy")


@mistake("is not deterministic: a batch computed twice")
class NumpyGenerator(Points):
    def model(self) -> nn.Module:
        return Noisy("numpy's own")


@mistake("drew random numbers whose values would depend on how the job is spread")
class PythonInForward(Points):
    def model(self) -> nn.Module:
        return Noisy("python")


@mistake("drew random numbers whose values would depend on how the job is spread")
class OrderInForward(Points):
    def model(self) -> nn.Module:
        return Noisy("order")


@mistake("is not deterministic: a batch computed twice")
class CountsCalls(Points):
    def model(self) -> nn.Module:
        return Noisy("counts")


@mistake("drew random numbers whose values would depend on how the job is spread")
class DrawsInLoss(Points):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> Any:
        weight = random.uniform(0.5, 1.5)  # here
        return phalanx.Loss(weight * F.cross_entropy(output, batch["y"], reduction="sum"), len(output))


class Listed(nn.Module):
    def __init__(self) -> None:  # here: ModulesInAList
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer.to(x.dtype)(x).relu()
        return self.last(x)


@mistake("layers of the model (Listed) gets gradients, and is no parameter of the model")
class ModulesInAList(Points):
    def model(self) -> nn.Module:
        return Listed()


class Scaled(nn.Module):
    def __init__(self) -> None:  # here: TensorNotParameter
        super().__init__()
        self.scale = torch.ones(3, requires_grad=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * self.scale


@mistake("scale of the model (Scaled) gets gradients, and is no parameter of the model")
class TensorNotParameter(Points):
    def model(self) -> nn.Module:
        return Scaled()


class Carries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRUCell(4, 8), nn.Linear(8, 3)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.state is None or len(self.state) != len(x):
            self.state = torch.zeros(len(x), 8, dtype=x.dtype)
        self.state = self.cell(x, self.state)  # here: CarriesOver
        return self.last(self.state)


@mistake("is not deterministic: a batch computed twice")
class CarriesOver(Points):
    def model(self) -> nn.Module:
        return Carries()


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:  # here: KeepsTheGraph
        if self.kept is None:
            self.kept = self.body(torch.ones(4, dtype=x.dtype))
        return self.last(self.body(x) + self.kept)


@mistake("keeps something of one batch for the next, with its gradients")
class KeepsTheGraph(Points):
    def model(self) -> nn.Module:
        return Caches()


@mistake("has no trainable weight")
class AllFrozen(Points):
    def model(self) -> nn.Module:  # here
        return nn.Linear(4, 3).requires_grad_(False)


class Quiet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.last = nn.Linear(4, 8), nn.Linear(8, 3)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:  # here: NoGradForward
        return self.last(self.body(x).relu())


@mistake("does not depend on any trainable weight")
class NoGradForward(Points):
    def model(self) -> nn.Module:
        return Quiet()


class HalfQuiet(Quiet):
    def forward(self, x: Tensor) -> Tensor:  # here: PartDetached
        with torch.no_grad():
            hidden = self.body(x).relu()
        return self.last(hidden)


@mistake("take part in the forward and get no gradient", likely=True)
class PartDetached(Points):
    def model(self) -> nn.Module:
        return HalfQuiet()


@mistake("switches it to eval()")
class EvalInForward(Points):
    def model(self) -> nn.Module:
        return Noisy("eval")


class Uninitialised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:  # here: DividesByZero
        return self.last(self.body(x) / (x - x).sum(1, keepdim=True))


@mistake("first of all the output of")
class DividesByZero(Points):
    def model(self) -> nn.Module:
        return Uninitialised()


# Inputs, data, held-out data.


@mistake("NormalisesTheBatch.inputs mixes samples")
class NormalisesTheBatch(Points):
    def inputs(self, batch: dict[str, Any]) -> Any:  # here
        return (batch["x"] - batch["x"].mean(0)) / batch["x"].std(0)


@mistake("ScalesInCollate.collate mixes samples")
class ScalesInCollate(Points):
    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:  # here
        x = torch.stack([sample["x"] for sample in samples])
        return {"x": x / x.abs().max(), "y": torch.tensor([int(sample["y"]) for sample in samples])}


@mistake("DrawsInCollate.collate draws at random", likely=True)
class DrawsInCollate(Points):
    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:  # here
        x = torch.stack([sample["x"] for sample in samples])
        return {"x": x + 0.1 * torch.randn_like(x), "y": torch.tensor([int(sample["y"]) for sample in samples])}


class Samples:
    """Points by number; ``kind`` is what is wrong with them."""

    def __init__(self, kind: str, points: Any) -> None:
        self.kind, self.points = kind, points
        self.buffer = torch.zeros(4)
        self.source = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self.points) + (self.kind == "too long")

    def __getitem__(self, index: int) -> Any:  # here: SharedBuffer OwnAugmentation OwnLibrary ChangesWhatIsStored
        if self.kind == "raises" and index % 2:
            raise OSError("the image is truncated")  # here: SampleRaises
        if self.kind == "too long" and index >= len(self.points):
            raise IndexError(index)  # here: LengthIsWrong
        sample = self.points[index]
        if self.kind == "buffer":
            self.buffer.copy_(sample["x"])
            return {**sample, "x": self.buffer}
        if self.kind == "generator":
            return {**sample, "x": sample["x"] + float(self.source.normal())}
        if self.kind == "library":
            return {**sample, "x": self.points.library(sample["x"])}
        if self.kind == "in place":
            sample["x"].mul_(0.5)
        if self.kind == "tuple":
            return sample["x"], sample["y"]
        return sample


@mistake("share memory: reading sample")
class SharedBuffer(Points):
    def data(self) -> Any:
        return Samples("buffer", self.points(64, 0))


@mistake("before each sample is read: def reseed(self, seed): self.source = np.random.default_rng(seed).")
class OwnAugmentation(Points):
    def data(self) -> Any:
        return Samples("generator", self.points(64, 0))


class Library:
    """Draws from generators of its own, as libraries of augmentations do."""

    def __init__(self) -> None:
        self.inner = {"source": np.random.default_rng(0)}
        self.generators = [np.random.default_rng(0)]

    def set_random_seed(self, seed: int) -> None:
        self.generators[0] = np.random.default_rng(seed)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + float(self.generators[0].normal())


@mistake("def reseed(self, seed): self.points.library.set_random_seed(seed).")
class OwnLibrary(Points):
    def data(self) -> Any:
        samples: Any = Samples("library", self.points(64, 0))
        samples.points.library = Library()
        return samples


@mistake("and change a copy, not what is stored")
class ChangesWhatIsStored(Points):
    def data(self) -> Any:
        return Samples("in place", self.points(64, 0))


@mistake("return phalanx.data.Named(dataset")
class GivesTuples(Points):
    def data(self) -> Any:
        return Samples("tuple", self.points(64, 0))


@mistake("cannot be read: OSError: the image is truncated")
class SampleRaises(Points):
    def data(self) -> Any:
        return Samples("raises", self.points(64, 0))


@mistake("sample 64 of 65 cannot be read: IndexError")
class LengthIsWrong(Points):
    def data(self) -> Any:
        return Samples("too long", self.points(64, 0))


@mistake("has numbers that are not finite", likely=True)
class BadSamples(Points):
    def data(self) -> Any:  # here
        points = self.points(64, 0).columns
        return Arrays(x=points["x"].log(), y=points["y"])


@mistake("of the held-out samples are also trained on")
class SplitTwice(Points):
    def parts(self) -> Any:
        return torch.utils.data.random_split(self.points(200, 0), [160, 40])  # type: ignore[arg-type]

    def data(self) -> Any:
        return self.parts()[0]

    def held_out(self) -> Any:  # here
        return self.parts()[1]


@mistake("of the held-out samples are also trained on")
class ShuffledTwice(Points):
    def parts(self) -> list[Any]:
        order, points = torch.randperm(200), self.points(200, 0)
        chosen = [points[int(i)] for i in order]
        return [chosen[:160], chosen[160:]]

    def data(self) -> Any:
        return self.parts()[0]

    def held_out(self) -> Any:  # here
        return self.parts()[1]


@dataclass
class WithHeldOut(Points):
    def held_out(self) -> Any:
        return self.points(32, 1)


@mistake("evaluate's 'accuracy' is a mean and a count of 1")
class MeanOfMeans(WithHeldOut):
    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> Any:
        right = (output.argmax(1) == batch["y"]).double().mean()
        return {"loss": self.loss(output, batch), "accuracy": phalanx.Loss(right, 1)}  # here


@mistake("evaluate's 'spread' depends on which samples are computed together")
class MixesInEvaluate(WithHeldOut):
    def evaluate(self, output: Tensor, batch: dict[str, Any]) -> Any:
        centred = output - output.mean(0)  # here
        return {"spread": phalanx.Loss(centred.square().sum(), len(output))}


# Optimizers and schedules.


@mistake("tensors that are not those it was given")
class AnotherModel(Points):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:  # here
        return torch.optim.AdamW(self.model().parameters())


@mistake("are trainable and in no group of", likely=True)
class MatricesAlone(Points):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in params if p.ndim == 2])  # here


@mistake("some weights in more than one group")
class TwoGroups(Points):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": params}, {"params": params[:1], "lr": 1e-4}])  # here


@mistake("which would then be updated twice a step")
class SameWeightTwice(Points):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([*params, params[0]], lr=0.1)  # here


class Rowwise(torch.optim.Adafactor):
    elementwise = True


@mistake("which cannot be saved")
class Factored(Points):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return Rowwise(params)  # here


@mistake("returned a list")
class SeveralOptimizers(Points):
    def optimizer(self, params: Any) -> Any:  # here
        return [torch.optim.SGD(params, lr=0.1)]


@mistake("learning rate is 0 in every group", likely=True)
class NoRate(Points):
    learning_rate: float = 0.0

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.learning_rate)  # here


@mistake("schedule returned a StepLR")
class Scheduler(Points):
    def schedule(self) -> Any:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        return torch.optim.lr_scheduler.StepLR(optimizer, 10)  # here


@mistake("is it a rate itself?", likely=True)
class RateNotFactor(Points):
    def schedule(self) -> Callable[[int], float]:
        return lambda step: 1e-3 / (step + 1)  # here


@mistake("gives another factor when it is asked again")
class CountingSchedule(Points):
    def schedule(self) -> Callable[[int], float]:
        left = iter(range(1, 1000))
        return lambda step: 1 / next(left)  # here


@mistake("gets no further than 0.01 of what it is set to", likely=True)
class WarmupWithoutEnd(Points):
    warmup_steps: int = 400


@mistake("the targets are torch.float32 of shape (7,)")
class ClassesAsReals(Points):
    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, batch["y"].float())  # here


@mistake("the result of a relu, never below 0", likely=True)
class ReluAtTheEnd(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3), nn.ReLU())

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, batch["y"])  # here


@mistake("each target is the id that the model gets at the same place", likely=True)
class NotShifted(Points):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))

    def data(self) -> Any:
        return Arrays(ids=torch.randint(0, 16, (64, 12), generator=torch.Generator().manual_seed(0)))

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["ids"]

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, batch["ids"], dim=-1)  # here


class TwoLayers(nn.Module):
    """What models of mistakes in forward have."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 16), nn.Linear(16, 3)


class DropsAlways(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.dropout(self.a(x).relu(), 0.5))  # here: DropoutInEvaluation


@mistake("dropout stays on in evaluation", likely=True)
class DropoutInEvaluation(WithHeldOut):
    def model(self) -> nn.Module:
        return DropsAlways()


@mistake("for 'accuracy', returned a float, not a sum and a count")
class MeasuresAFloat(WithHeldOut):
    def evaluate(self, output: Any, batch: dict[str, Any]) -> Any:
        return {"accuracy": (output.argmax(-1) == batch["y"]).float().mean().item()}  # here


@mistake("every gradient of 0.weight, 2.weight is 0", likely=True)
class AllZero(Points):
    def model(self) -> nn.Module:  # here
        model = super().model()
        for weight in model.parameters():
            nn.init.zeros_(weight)
        return model


@mistake("all rows of 0.weight are the same and get the same gradient", likely=True)
class AllTheSame(Points):
    def model(self) -> nn.Module:  # here
        model = super().model()
        for weight in model.parameters():
            nn.init.constant_(weight, 0.1)
        return model


class ChangesInPlace(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.a(x))  # here: InPlace
        squared = hidden * 2
        hidden += 1
        return self.b(squared + hidden)


@mistake("changes something in place that backward needs as it was")
class InPlace(Points):
    def model(self) -> nn.Module:
        return ChangesInPlace()


@mistake("calls torch.distributed itself")
class GathersItself(Points):
    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        every = [torch.zeros_like(output) for _ in range(dist.get_world_size())]  # here
        dist.all_gather(every, output)
        return phalanx.losses.cross_entropy(output, batch["y"])


@mistake("has a term that is the same however many samples there are")
class PenaltyOfWeights(Points):
    def model(self) -> nn.Module:
        self.made = super().model()
        return self.made

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        loss = phalanx.losses.cross_entropy(output, batch["y"])
        penalty = sum(weight.square().sum() for weight in self.made.parameters())
        return phalanx.Loss(loss.total + 0.01 * penalty, loss.count)  # here


@mistake("phalanx.data.Mixup")
class MixesABatch(Points):
    def inputs(self, batch: dict[str, Any]) -> Any:
        others = torch.randperm(len(batch["x"]))  # here
        return 0.5 * batch["x"] + 0.5 * batch["x"][others]


@mistake("MakesNoModel.model returned a NoneType")
class MakesNoModel(Points):
    def model(self) -> Any:  # here
        nn.Linear(4, 3)


class OfTwelve(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.view(12, 4))  # here: OneSizeAlone


@mistake("with 7 samples; with 12 it does not")
class OneSizeAlone(Points):
    global_batch: int = 12

    def model(self) -> nn.Module:
        return OfTwelve()


@mistake("schedule fails for step 4: IndexError")
class ScheduleThatEnds(Points):
    steps: int = 10

    def schedule(self) -> Callable[[int], float]:
        rates = [1.0, 0.5, 0.1]
        return lambda step: rates[step]  # here


@mistake("made 3 rows of 7 samples")
class LeavesOut(Points):
    def collate(self, samples: Sequence[Any]) -> dict[str, Any]:  # here
        return super().collate([sample for sample in samples if sample["x"][0] > 0])


@mistake("changes 'x' of a batch in place", likely=True)
class ChangesTheBatch(Points):
    def inputs(self, batch: dict[str, Any]) -> Any:
        batch["x"] -= 1  # here
        return batch["x"]


@mistake("changes 'x' of a batch in place")
class ChangesWhatIsComputedTwice(Points):
    def inputs(self, batch: dict[str, Any]) -> Any:
        batch["x"] -= 1  # here
        return batch["x"]

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        every = phalanx.gather(output)
        return phalanx.Loss((output - every.mean(0)).square().sum(), len(output))


class Detaches(TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).detach().relu())  # here: DetachesALayer


@mistake("a.weight, a.bias take part in the forward and get no gradient", likely=True)
class DetachesALayer(Points):
    def model(self) -> nn.Module:
        return Detaches()


class MakesALayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear(16, 3)(self.a(x).relu())  # here: LayerInForward


@mistake("make it in the constructor")
class LayerInForward(Points):
    def model(self) -> nn.Module:
        return MakesALayer()


@mistake("and are whole numbers: as the probability of each class they must be real")
class WholeOneHot(Points):
    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output, F.one_hot(batch["y"], 3))  # here


@mistake("max_iterations is a setting of NobodyReads that nothing reads", likely=True)
class NobodyReads(Points):  # here
    max_iterations: int = 3


@mistake("a task has held_out()", likely=True)
class NearlyHeldOut(Points):
    def heldout(self) -> Any:  # here
        return self.points(32, 1)


class ReturnsNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> None:  # here: NoReturn
        self.a(x)


@mistake("forward of ReturnsNothing returned nothing")
class NoReturn(Points):
    def model(self) -> nn.Module:
        return ReturnsNothing()


@mistake("for 'accuracy' a tensor of shape () for 7 samples")
class MeasuresAMean(WithHeldOut):
    def evaluate(self, output: Any, batch: dict[str, Any]) -> Any:
        return {"accuracy": (output.argmax(-1) == batch["y"]).float().mean()}  # here


@mistake("and there is no summarise() to make numbers of it")
class NothingSummarised(WithHeldOut):
    def evaluate(self, output: Any, batch: dict[str, Any]) -> Any:
        return {"scores": output.softmax(-1)[:, 1]}  # here


@mistake("LBFGS evaluates the loss many times")
class Newton(Points):
    def optimizer(self, params: Any) -> torch.optim.Optimizer:  # here
        return torch.optim.LBFGS(params)


@mistake("others each time: last_batch=drop; or add them to the step before: last_batch=merge.")
class NormedAlone(Points):
    steps: int = 5

    def data(self) -> Any:
        return self.points(65, 0)

    def model(self) -> nn.Module:  # here
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


@mistake("That is where the last step of an epoch has 1 sample (65 samples in batches of 16)")
class Squeezed(Points):
    steps: int = 5

    def data(self) -> Any:
        return self.points(65, 0)

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output.squeeze(), batch["y"])  # here
