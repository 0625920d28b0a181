"""Nothing is said of recipes, examples and models of Hugging Face's, as they come."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

import phalanx
from phalanx.data import Arrays
from phalanx.recipes.gpt import GPT
from phalanx.recipes.sft import SFT
from phalanx.recipes.shapes import Shapes
from phalanx.references import find_task
from phalanx.train.check import checking
from phalanx.train.check.beside import checked
from tests.families import FAMILIES, FamilyTask
from tests.hugging_face import CONFIGS, SIZES, TOKENS, config
from tests.mistakes import Points
from tests.parity import PRIME
from tests.tasks import Digits

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.py"))
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo2": ("Olmo2Config", SIZES),
    "stablelm": ("StableLmConfig", SIZES),
    "cohere": ("CohereConfig", SIZES),
    "granite": ("GraniteConfig", SIZES),
    "smollm3": ("SmolLM3Config", SIZES),
    "gemma3": ("Gemma3TextConfig", SIZES | {"head_dim": 6}),
    "glm4": ("Glm4Config", SIZES | {"head_dim": 6}),
    "qwen3-moe": ("Qwen3MoeConfig", SIZES | {"head_dim": 6, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("OPTConfig", TOKENS | {
        "hidden_size": 24, "ffn_dim": 29, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 1,
        "word_embed_proj_dim": 24, "max_position_embeddings": 32,
    }),
    "mamba": ("MambaConfig", {"vocab_size": PRIME, "hidden_size": 24, "num_hidden_layers": 2, "state_size": 4}),
}  # fmt: skip


@dataclass
class Plain(phalanx.Task):
    """A model of Hugging Face's, nothing of it changed."""

    kind: str = "llama"
    global_batch: int = 8

    counts = "tokens"

    def model(self) -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(made(self.kind))

    def data(self) -> Any:
        source = np.random.default_rng(0)
        ids = source.integers(1, PRIME, size=(24, 13))
        return Arrays(input_ids=ids[:, :-1], targets=np.where(source.random((24, 12)) < 0.3, -100, ids[:, 1:]))

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"input_ids": batch["input_ids"]}

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output.logits, batch["targets"], dim=-1)


def made(kind: str) -> PretrainedConfig:
    if kind in CONFIGS:
        return config(kind)
    name, values = MORE[kind]
    return getattr(transformers, name)(**values)


def quiet(task: phalanx.Task) -> None:
    found = checked(task)
    assert (found.refusal, found.warnings, found.left_out) == ("", [], "")


SOME = ("clip", "opt", "swin")  # of which swin's attention takes another kernel where there are no gradients
FEW = ("llama", "gpt2", "mixtral", "olmo2")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in FEW else [pytest.mark.every]) for kind in [*CONFIGS, *MORE]]
)
def test_hugging_face(kind: str) -> None:
    quiet(Plain(kind=kind))


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SOME else [pytest.mark.every]) for kind in FAMILIES]
)
def test_families(kind: str) -> None:
    quiet(FamilyTask(kind=kind))


@pytest.mark.parametrize("task", [
    GPT(megabytes=0.5), GPT(megabytes=0.5, dropout=0.2, experts=4, tied=True, bias=True),
    GPT(megabytes=0.5, width=768, layers=12, heads=12, length=256), GPT(megabytes=0.5, precision="bf16"), Shapes(),
    SFT(), SFT(lora=4), Digits(), Digits(global_batch=1), Digits(samples=8, precision="float64"),
], ids=str)  # fmt: skip
def test_recipes(task: phalanx.Task) -> None:
    quiet(task)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples(path: Path) -> None:
    quiet(find_task(str(path))())


@dataclass
class Bert(Plain):
    """An encoder with padding and its mask, dropout, and a pooler; ``labels`` for the whole sequence."""

    def model(self) -> nn.Module:
        sizes = {"hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 4}
        return transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=131, **sizes))

    def data(self) -> Any:
        source = np.random.default_rng(0)
        lengths = source.integers(3, 12, size=40)
        return [{"ids": source.integers(1, 131, size=n), "label": int(n % 2)} for n in lengths]

    def collate(self, samples: Any) -> dict[str, Any]:
        ids = nn.utils.rnn.pad_sequence([torch.as_tensor(s["ids"]) for s in samples], batch_first=True)
        return {"ids": ids, "label": torch.tensor([s["label"] for s in samples])}

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"input_ids": batch["ids"], "attention_mask": (batch["ids"] != 0).long()}

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output.logits, batch["label"])


@dataclass
class Vision(Plain):
    def model(self) -> nn.Module:
        sizes = {"hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 4}
        return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=8, patch_size=4, **sizes))

    def data(self) -> Any:
        images = np.random.default_rng(0).integers(0, 256, size=(40, 8, 8, 3), dtype=np.uint8)
        return phalanx.data.Images(images, np.arange(40) % 2, augment=True)

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"pixel_values": batch["image"]}

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output.logits, batch["label"])


class Odd(nn.Module):
    """What is right and looks wrong: batch-norm, a frozen part, a buffer that forward changes, a weight of zeros, a
    teacher that is not trained, draws of torch's own, a fixed generator for what all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 3)
        nn.init.zeros_(self.last.weight)
        self.register_buffer("seen", torch.zeros(()))
        self.teacher = [nn.Linear(4, 3)]
        self.unused = nn.Parameter(torch.ones(3))
        self.average = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        self.average.data.mul_(0.9).add_(self.last.bias.detach(), alpha=0.1)
        with torch.no_grad():
            self.teacher[0].to(x.dtype)(x)
        projection = torch.randn(16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x)
        hidden = self.frozen(self.body(x + 0.1 * torch.randn_like(x)))
        return self.last(hidden + 0.1 * hidden @ projection) + self.average


@dataclass
class Oddities(Digits):
    """Held-out samples that by chance are trained on, too; a loss in float32 alone."""

    constant: list[float] = field(default_factory=lambda: [1.0, 2.0, 0.5])

    def model(self) -> nn.Module:
        return Odd()

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        weight = torch.tensor(self.constant)
        total = nn.functional.cross_entropy(output.float(), batch["y"], weight, reduction="sum")
        return phalanx.Loss(total, len(output))


@pytest.mark.parametrize("task", [Bert(), Vision(), Oddities()], ids=lambda task: type(task).__name__)
def test_what_is_right_and_looks_wrong(task: phalanx.Task) -> None:
    quiet(task)


@dataclass
class Labelled(phalanx.Task):
    """Points with a label each, which is no class's number."""

    global_batch: int = 8
    classes: int = 1

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, self.classes))

    def labels(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": (x[:, 0] > 0).long()}

    def data(self) -> Any:
        x = torch.randn(64, 4, generator=torch.Generator().manual_seed(3))
        return Arrays(x=x, **self.labels(x))

    def inputs(self, batch: dict[str, Any]) -> Any:
        return batch["x"]


@dataclass
class Reinforce(Labelled):
    """Of a reward of 0 nothing is learned, and it counts."""

    classes: int = 3

    def labels(self, x: Tensor) -> dict[str, Tensor]:
        return {"action": x[:, :3].argmax(1), "reward": (x[:, 3] > 0).long()}

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        chosen = output.log_softmax(1).gather(1, batch["action"][:, None])[:, 0]
        return phalanx.Loss(-(chosen * batch["reward"]).sum(), len(output))


@dataclass
class Siamese(Labelled):
    """Pairs that are different and far enough apart have no loss."""

    classes: int = 2
    same: int = 1

    def inputs(self, batch: dict[str, Any]) -> Any:
        return torch.stack([batch["x"], 50 * batch["x"].flip(1)], 1)

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        one, two = output.unbind(1)
        distance = (one - two).square().sum(1).add(1e-12).sqrt()
        each = torch.where(batch["y"] == self.same, distance.square(), F.relu(0.01 - distance).square())
        return phalanx.Loss(each.sum(), len(each))


@dataclass
class Hinge(Labelled):
    """Labels of -1 and 1, as a support vector machine has; the bias is far on one side."""

    def model(self) -> nn.Module:
        model = nn.Linear(4, 1)
        nn.init.constant_(model.bias, -20.0)
        return model

    def labels(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": (x[:, 0] > 0).long() * 2 - 1}

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.Loss(F.relu(1 - output[:, 0] * batch["y"]).sum(), len(output))


@dataclass
class Cosine(Hinge):
    """Pairs that are no pairs, at -1, are left alone where their cosine is small."""

    def model(self) -> nn.Module:
        return Labelled.model(Labelled(classes=3))

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        fixed = torch.tensor([1.0, -1.0, 1.0]).to(output).expand_as(output)
        total = F.cosine_embedding_loss(output, fixed, batch["y"], margin=0.99, reduction="sum")
        return phalanx.Loss(total, len(output))


@dataclass
class Masked(Labelled):
    """A regression by weights of 0 and 1; ``counted``: those of 0 as well, on purpose."""

    counted: bool = False

    def labels(self, x: Tensor) -> dict[str, Tensor]:
        return {"target": x.sum(1), "weight": (x[:, 0] > 0).long()}

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        total = (batch["weight"] * (output[:, 0] - batch["target"]).square()).sum()
        return phalanx.Loss(total, len(output) if self.counted else batch["weight"].sum())


@dataclass
class Focal(Labelled):
    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        right = torch.where(batch["y"] == 1, output[:, 0], -output[:, 0])
        return phalanx.Loss(-((1 - right.sigmoid()) ** 2 * F.logsigmoid(right)).sum(), len(output))


@dataclass
class Triplet(Labelled):
    classes: int = 5

    def labels(self, x: Tensor) -> dict[str, Tensor]:
        return {"near": x + 0.1, "far": -x}

    def inputs(self, batch: dict[str, Any]) -> Any:
        return torch.stack([batch["x"], batch["near"], batch["far"]], 1)

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.Loss(F.triplet_margin_loss(*output.unbind(1), reduction="sum"), len(output))


@dataclass
class BySequence(Labelled):
    """The mean over sequences of the sum over their tokens, some of which are left out."""

    classes: int = 9
    left_out: int = -100

    def labels(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": torch.where(x[:, :3] > 0, self.left_out, x.argmax(1)[:, None] % 3)}

    def loss(self, output: Tensor, batch: dict[str, Any]) -> phalanx.Loss:
        scores, y = output.reshape(-1, 3), batch["y"].flatten()
        return phalanx.Loss(F.cross_entropy(scores, y, reduction="sum", ignore_index=self.left_out), len(output))


CORRECT = [
    Reinforce(), Siamese(), Siamese(same=0), Hinge(), Cosine(), Masked(), Masked(counted=True), Focal(), Triplet(),
    BySequence(), BySequence(left_out=-1), BySequence(left_out=0),
]  # fmt: skip


@pytest.mark.parametrize("task", CORRECT, ids=lambda task: type(task).__name__)
def test_losses_that_are_right(task: phalanx.Task) -> None:
    quiet(task)


def test_few_different_samples_are_no_leak() -> None:
    @dataclass
    class Coins(Digits):
        """There are only eight points: training and held-out samples are the same by chance."""

        def _points(self, n: int, seed: int) -> Arrays:
            bits = torch.randint(0, 2, (n, 3), generator=torch.Generator().manual_seed(seed))
            return Arrays(x=torch.cat([bits, bits[:, :1]], 1).float(), y=bits[:, 0])

    found = checked(Coins(samples=200))
    assert not found.refusal
    assert "Is the same twice in the data" in found.warnings[0]


@dataclass
class Large(Plain):
    """Too large to be tried as it is; made smaller by its configuration, its words kept."""

    vocabulary: int = 3000
    wrong: bool = False

    def model(self) -> nn.Module:
        sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 8}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=self.vocabulary, **sizes))

    def data(self) -> Any:
        ids = np.random.default_rng(0).integers(0, 3000, size=(64, 513))
        return Arrays(input_ids=ids[:, :-1], targets=ids[:, 1:])

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        found = super().loss(output, batch)
        return phalanx.Loss(found.total / len(batch["targets"]), found.count) if self.wrong else found


def test_a_large_model_is_made_small() -> None:
    quiet(Large())
    assert "is a mean over the batch, not a sum" in checked(Large(wrong=True)).refusal
    assert "out of range" in checked(Large(vocabulary=2000)).refusal


def test_what_is_too_large_is_said() -> None:
    @dataclass
    class Huge(Digits):
        def model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 20_000), nn.Linear(20_000, 20_000), nn.Linear(20_000, 3))

    found = checked(Huge())
    assert not found.refusal
    assert "too many to try it on the CPU first" in found.warnings[0]


@dataclass
class SlowNorm(Points):
    """A model with batch-norm on which each look takes long."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def test_batch_norm_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SLOW_SECONDS", 0.0)
    quiet(SlowNorm())


@dataclass
class Answering(Points):
    """Where in a long text an answer begins; what is made smaller has shorter texts."""

    def model(self) -> nn.Module:
        return transformers.BertForQuestionAnswering(
            transformers.BertConfig(vocab_size=4000, hidden_size=256, num_attention_heads=4, num_hidden_layers=4)
        )

    def data(self) -> Any:
        made = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 4000, (64, 64), generator=made)
        return Arrays(input_ids=ids, labels=torch.rand(64, 50, generator=made).round(), start=torch.arange(64) % 64)

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"input_ids": batch["input_ids"]}

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        assert batch["labels"].shape[1] == 50
        return phalanx.losses.cross_entropy(output.start_logits, batch["start"])


def test_places_in_a_text_that_is_cut_off() -> None:
    found = checked(Answering())
    assert (found.refusal, found.warnings) == ("", [])
    assert "made smaller, Answering.loss() fails: IndexError: Target" in found.left_out


@dataclass
class LabelsInside(Points):
    """A model that is given the labels, too."""

    def model(self) -> nn.Module:
        small = transformers.BertConfig(
            vocab_size=40,
            hidden_size=16,
            num_attention_heads=2,
            intermediate_size=16,
            num_hidden_layers=1,
            num_labels=5,
        )
        return transformers.BertForTokenClassification(small)

    def data(self) -> Any:
        ids = torch.randint(0, 40, (64, 12), generator=torch.Generator().manual_seed(0))
        return Arrays(input_ids=ids, labels=ids % 5)

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"input_ids": batch["input_ids"], "labels": batch["labels"]}

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output.logits, batch["labels"], dim=-1)


def test_labels_that_a_model_is_given_are_not_looked_up() -> None:
    quiet(LabelsInside())
