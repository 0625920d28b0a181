"""Training loops as one writes them by hand with torch alone: what Phalanx's overhead is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from phalanx import losses
from phalanx.recipes.gpt import GPT


class ByHand:
    """The recipe `gpt` trained by a loop of one's own: alone, with DDP, or with fully_shard."""

    def __init__(self, task: GPT, kind: str) -> None:
        self.task, self.data, self.kind = task, task.data(), kind
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if kind != "alone" else (0, 1)
        torch.manual_seed(task.seed)
        model = task.model()
        self.plain = model
        if kind == "ddp":
            model = DistributedDataParallel(model)
        elif kind == "fully_shard":
            mesh = init_device_mesh("cpu", (self.world,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        self.model: nn.Module = model
        self.parameters = list(model.parameters())
        self.optimizer = task.optimizer(self.parameters)
        self.schedule = task.schedule()
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, number: int, ids: Any) -> float:
        """Read this rank's samples, and train on them; the same work as a step of Phalanx."""
        mine = ids[self.rank * len(ids) // self.world : (self.rank + 1) * len(ids) // self.world]
        samples = [self.data[int(index)] for index in mine]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        output = self.model(**self.task.inputs(batch))
        total, count = self._loss(output, batch["targets"])
        (total * self.world / count).backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, self.task.clip)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.schedule(number)
        if torch.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return self._mean(total, count)

    def _loss(self, output: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss = losses.cross_entropy(output, targets)
        count = torch.as_tensor(loss.count, dtype=torch.float64)
        if self.world > 1:
            dist.all_reduce(count)
        return loss.total, count

    def _mean(self, total: Tensor, count: Tensor) -> float:
        total = total.detach().double()
        if self.world > 1:
            dist.all_reduce(total)
        return float(total / count)


def interleaved(
    ours: Callable[[int], Any], theirs: Callable[[int], Any], pairs: int, clock: Callable[[], float]
) -> list[tuple[float, float]]:
    """Seconds of both, taken in turns, which goes first changing from pair to pair."""
    found = []
    for number in range(pairs + 3):
        seconds = [0.0, 0.0]
        for which in (0, 1) if number % 2 else (1, 0):
            started = clock()
            (ours, theirs)[which](number)
            seconds[which] = clock() - started
        if number >= 3:  # the first ones warm up
            found.append((seconds[0], seconds[1]))
    return found
