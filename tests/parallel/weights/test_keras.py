"""Keras 3 on torch, unmodified: filled, proven, and refused where ranks would go apart."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx.parallel.weights.blueprint import Blueprint

os.environ.setdefault("KERAS_BACKEND", "torch")  # before it is imported
keras = pytest.importorskip("keras", reason="keras is not installed (the dev extra has it)")


@dataclass
class Dense(phalanx.Task):
    kind: str = "plain"
    global_batch: int = 8
    steps: int = 3

    def model(self) -> nn.Module:
        layers = keras.layers
        first = [] if self.kind == "unbuilt" else [layers.Input((5,))]
        inner = [layers.BatchNormalization()] if self.kind == "statistics" else [layers.LayerNormalization()]
        return keras.Sequential([
            *first, layers.Dense(6, activation="gelu"), *inner, layers.Dropout(0.3), layers.Dense(3),
        ])  # fmt: skip

    def data(self) -> phalanx.data.Arrays:
        generator = torch.Generator().manual_seed(1)
        return phalanx.data.Arrays(x=torch.randn(40, 5, generator=generator), y=torch.arange(40) % 3)

    def inputs(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["x"]

    def loss(self, output: Any, batch: dict[str, Tensor]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output, batch["y"])


def test_weights_are_filled_and_named_alike_in_every_model() -> None:
    one, other = (Blueprint(Dense().model, seed=3) for _ in range(2))
    values = [{n: b.value(w, "cpu") for n, w in b.model.named_parameters()} for b in (one, other)]
    assert one.reseeded is other.reseeded is None, "it is not the constructor that seeds Keras"
    assert list(values[0]) == list(values[1])
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    kernels = [v for n, v in values[0].items() if n.endswith("kernel")]
    assert len(kernels) == 2
    assert all(0 < float(k.abs().max()) < 2 for k in kernels)


def test_a_model_that_imports_keras_itself_begins_like_all_others() -> None:
    """As in ranks, where the task's constructor may be the first to import it."""
    program = """
        import os
        os.environ["KERAS_BACKEND"] = "torch"
        from phalanx.parallel.weights.blueprint import Blueprint

        def model():
            import keras
            return keras.Sequential([keras.layers.Input((5,)), keras.layers.Dropout(0.3), keras.layers.Dense(3)])

        def values():
            made = Blueprint(model, seed=3)
            return {name: made.value(w, "cpu").tolist() for name, w in made.model.named_parameters()}

        first = values()
        assert first == values(), first
        """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_it_trains_like_one_device() -> None:
    verdict = phalanx.prove(Dense(), ["dp=2", "fsdp=2,zero=3"])
    assert verdict.holds, verdict


@pytest.mark.parametrize(("kind", "words"), [
    ("unbuilt", "has no weights before its first call"),
    ("statistics", "is changed by the model itself, and each rank would change it by its own samples"),
])  # fmt: skip
def test_what_ranks_could_not_do_alike_is_refused(kind: str, words: str) -> None:
    with pytest.raises(phalanx.WrongUse, match=words), phalanx.Engine(Dense(kind=kind), device="cpu") as engine:
        engine.step(next(engine.batches()))
