"""One way to compute: threads and kernels are set, put back, and do the same with every element."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from phalanx.train.optimizers import ELEMENTWISE
from phalanx.train.steady import MEMORY, in_one_way, steady

CPU = torch.device("cpu")


def test_everything_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for threads in ("", "2"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        undo = steady(CPU)
        assert torch.get_num_threads() == int(threads or 1)
        assert torch.are_deterministic_algorithms_enabled()
        assert not MEMORY.fill_uninitialized_memory
        undo()
        assert torch.get_num_threads() == 1
        assert not torch.are_deterministic_algorithms_enabled()
        assert MEMORY.fill_uninitialized_memory
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def updated(kind: Any, options: dict[str, Any], value: Tensor, gradients: Tensor, cuts: list[int]) -> Tensor:
    """A weight after some steps, held in pieces."""
    shards = [nn.Parameter(shard.clone()) for shard in value.tensor_split(cuts)]
    optimizer = kind(shards, lr=1e-2, **options)
    in_one_way(optimizer, CPU)
    for gradient in gradients:
        for shard, own in zip(shards, gradient.tensor_split(cuts), strict=True):
            shard.grad = own.clone()
        optimizer.step()
    return torch.cat([shard.data for shard in shards])


FUSED: list[tuple[Any, dict[str, Any]]] = [
    (optim.AdamW, {"fused": True}),
    (optim.SGD, {"fused": True, "momentum": 0.9}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("kind", "options"), [*((kind, {}) for kind in ELEMENTWISE), *FUSED])
def test_an_element_is_updated_alike_wherever_it_lies(kind: Any, options: dict[str, Any], dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    value = torch.randn(253, generator=source, dtype=dtype)
    gradients = torch.randn(9, 253, generator=source, dtype=dtype)
    whole = updated(kind, options, value, gradients, [])
    for cuts in ([127], [5, 11, 30], list(range(1, 20))):
        assert torch.equal(updated(kind, options, value, gradients, cuts), whole)
