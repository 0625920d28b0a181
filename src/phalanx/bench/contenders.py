"""Who is measured: the same shape, tokens, AdamW and clipping, each as its own users would train it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.bench.shape import Llama, Shape, hugging_face, transformer
from phalanx.bench.stand_ins import StandIns
from phalanx.task import Precision

Step = Callable[[], Any]
RATE = 3e-4


@dataclass(frozen=True)
class Setting:
    """What all contenders have alike."""

    shape: Shape
    device: str
    precision: Precision

    def batch(self) -> tuple[Tensor, Tensor]:
        size = self.shape.batch, self.shape.length + 1
        tokens = torch.randint(0, self.shape.vocabulary, size, device=self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def autocast(self) -> AbstractContextManager[Any]:
        """In bf16 where anything narrower than float32 is asked for: peers train no narrower here."""
        return nullcontext() if self.precision == "fp32" else torch.autocast(self.device, torch.bfloat16)


def ours(setting: Setting, own: bool) -> Iterator[Step]:
    task = Llama(
        shape=setting.shape, hugging_face=not own, global_batch=setting.shape.batch, precision=setting.precision,
        learning_rate=RATE,
    )  # fmt: skip
    layout = "dp=1,compile=blocks" if setting.device == "cuda" else "dp=1"
    with phalanx.Engine(task, layout, device=setting.device) as engine:
        batches = engine.batches()
        yield lambda: engine.step(next(batches))


def plain(setting: Setting) -> Iterator[Step]:
    """Our model in a loop of a few lines, as torch gives it: not compiled, all logits at once."""
    model = transformer(setting.shape).to(setting.device)
    yield _loop(setting, model, lambda tokens: model(tokens).tensor(), _cross_entropy)


def torchtitan(setting: Setting) -> Iterator[Step]:
    """Its model, every block compiled, its loss compiled, fused AdamW."""
    sys.meta_path.append(StandIns())
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer as Titan

    shape = setting.shape
    arguments = TransformerModelArgs(
        dim=shape.width, n_layers=shape.layers, n_heads=shape.heads, n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocabulary, ffn_dim_multiplier=1.5, multiple_of=min(1024, 4 * shape.width),
        rope_theta=500_000, max_seq_len=shape.length,
    )  # fmt: skip
    with torch.device("meta"):
        model = Titan(arguments)
    model.to_empty(device=setting.device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(setting.device))
    if setting.device == "cuda":
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
    loss_of = torch.compile(_cross_entropy) if setting.device == "cuda" else _cross_entropy
    yield _loop(setting, model, model, loss_of)


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def _loop(setting: Setting, model: nn.Module, call: Callable[[Tensor], Tensor], loss_of: Callable[..., Tensor]) -> Step:
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, RATE, fused=True)

    def step() -> Tensor:
        tokens, targets = setting.batch()
        with setting.autocast():
            loss = loss_of(call(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def accelerate(setting: Setting) -> Iterator[Step]:
    """With transformers, not compiled."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="no" if setting.precision == "fp32" else "bf16", cpu=setting.device == "cpu"
    )
    with torch.device(setting.device):
        model = hugging_face(setting.shape)
    weights = list(model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(weights, RATE, fused=True))

    def step() -> Tensor:
        tokens, _ = setting.batch()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield step


@dataclass(frozen=True)
class Contender:
    """One of them."""

    title: str
    steps: Callable[[Setting], Iterator[Step]]
    needs: tuple[str, ...] = ()
    """Packages."""


CONTENDERS = {
    "phalanx": Contender("Phalanx, its own transformer", lambda setting: ours(setting, own=True)),
    "phalanx-hf": Contender(
        "Phalanx with a Hugging Face Llama", lambda setting: ours(setting, own=False), ("transformers",)
    ),
    "torch": Contender("a plain loop in torch", plain),
    "torchtitan": Contender("torchtitan, compiled block by block", torchtitan, ("torchtitan",)),
    "accelerate": Contender("Accelerate with transformers", accelerate, ("accelerate", "transformers")),
}
