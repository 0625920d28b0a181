"""Tokens a second of one contender on a GPU: a Llama shape in bf16 with fp32 weights, AdamW, clipped at 1.

python benchmarks/peers.py NAME [--layers N] [--width N] [--length N] [--batch N]

NAME: phalanx, phalanx-hf (a Hugging Face Llama), torchtitan (its model and recipe, compiled block by block), accelerate
(with transformers). Prints one JSON line. `benchmarks/gpu.py --only speed` runs all
that are installed, one process each.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import json
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.data import Arrays
from phalanx.models.transformer import Transformer, TransformerConfig

Step = Callable[[], Any]
VOCABULARY = 128_256


@dataclass(frozen=True)
class Shape:
    """By default Llama 3.2 1B's with a head of its own: 1.5 billion weights."""

    layers: int = 16
    width: int = 2048
    length: int = 4096
    batch: int = 4

    @property
    def heads(self) -> int:
        return self.width // 64

    @property
    def kv_heads(self) -> int:
        return self.heads // 4

    @property
    def tokens(self) -> int:
        return self.batch * self.length


@dataclass
class Llama(phalanx.Task):
    """On random tokens."""

    shape: Shape = Shape()
    hugging_face: bool = False
    global_batch: int = 4
    precision: phalanx.task.Precision = "bf16"
    steps: int = 1000

    counts = "tokens"

    def model(self) -> nn.Module:
        if self.hugging_face:
            return hugging_face(self.shape)
        shape = self.shape
        return Transformer(TransformerConfig(
            vocabulary=VOCABULARY, width=shape.width, layers=shape.layers, heads=shape.heads, kv_heads=shape.kv_heads,
            hidden=4 * shape.width, rope_base=500_000.0,
        ))  # fmt: skip

    def data(self) -> Arrays:
        size = 64, self.shape.length + 1
        return Arrays(tokens=np.random.default_rng(0).integers(0, VOCABULARY, size, dtype=np.int64))

    def inputs(self, batch: dict[str, Any]) -> Any:
        tokens = batch["tokens"][:, :-1]
        return {"input_ids": tokens} if self.hugging_face else tokens

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        logits = output.logits if self.hugging_face else output
        return phalanx.losses.cross_entropy(logits, batch["tokens"][:, 1:])


def hugging_face(shape: Shape) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=shape.width, intermediate_size=4 * shape.width,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.length, tie_word_embeddings=False, rope_theta=500_000.0, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return LlamaForCausalLM(config)


def ours(shape: Shape, own: bool, layout: str = "dp=1,compile=blocks") -> Iterator[Step]:
    task = Llama(shape=shape, hugging_face=not own, global_batch=shape.batch)
    with phalanx.Engine(task, layout, device="cuda") as engine:
        batches = engine.batches()
        yield lambda: engine.step(next(batches))


def random_batch(shape: Shape) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (shape.batch, shape.length + 1), device="cuda")
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def torchtitan(shape: Shape) -> Iterator[Step]:
    """Its model, every block compiled, its loss compiled, fused AdamW."""
    sys.meta_path.append(StandIns())
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer as Titan

    arguments = TransformerModelArgs(
        dim=shape.width, n_layers=shape.layers, n_heads=shape.heads, n_kv_heads=shape.kv_heads, vocab_size=VOCABULARY,
        ffn_dim_multiplier=1.5, multiple_of=1024, rope_theta=500_000, max_seq_len=shape.length,
    )  # fmt: skip
    with torch.device("meta"):
        model = Titan(arguments)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cuda"))
    for name, block in model.layers.named_children():
        model.layers.register_module(name, torch.compile(block, fullgraph=True))

    @torch.compile
    def loss_of(output: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())

    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, 3e-4, fused=True)

    def step() -> Tensor:
        tokens, targets = random_batch(shape)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(model(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    yield step


def accelerate(shape: Shape) -> Iterator[Step]:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    with torch.device("cuda"):
        model = hugging_face(shape)
    weights = list(model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(weights, 3e-4, fused=True))

    def step() -> Tensor:
        tokens, _ = random_batch(shape)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield step


CONTENDERS: dict[str, Callable[[Shape], Iterator[Step]]] = {
    "phalanx": lambda shape: ours(shape, own=True),
    "phalanx-hf": lambda shape: ours(shape, own=False),
    "torchtitan": torchtitan,
    "accelerate": accelerate,
}


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """In the place of packages that torchtitan imports and its model does not use, where they are not installed."""

    NAMES = ("datasets", "tensorboard", "torchao", "wandb", "tyro", "torchdata")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = name.split(".")[0] in self.NAMES
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        class Nothing(types.ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return type(name, (), {"__class_getitem__": classmethod(lambda cls, key: cls)})

        made = Nothing(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def measured(step: Step, shape: Shape, rounds: int = 3, each: int = 6) -> dict[str, float]:
    """After a few steps, so many in a row without waiting; the median of several such rounds."""
    started = time.perf_counter()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    for _ in range(4):
        step()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(each):
            step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begun) / each)
    seconds, memory = statistics.median(times), torch.cuda.max_memory_allocated() / 2**30
    return {"tokens_per_s": shape.tokens / seconds, "ms": seconds * 1e3, "gib": memory, "first_step_s": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONTENDERS)
    for field, default in vars(Shape()).items():
        parser.add_argument(f"--{field}", type=int, default=default)
    options = vars(parser.parse_args())
    name, shape = options.pop("name"), Shape(**options)
    torch.set_float32_matmul_precision("high")
    for step in CONTENDERS[name](shape):
        found = {key: round(value, 2) for key, value in measured(step, shape).items()}
        print(json.dumps({"contender": name, **vars(shape), **found}))


if __name__ == "__main__":
    main()
