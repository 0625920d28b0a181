"""Whole weights and gradients, put together from what all ranks hold: rows, parts and stages. A bucket at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from phalanx.parallel.weights.bucket import Bucket
from phalanx.parallel.weights.holding import Holding


class Whole:
    """A model's state as one device would have it. All ranks must ask for the same."""

    def __init__(
        self,
        model: nn.Module,
        buckets: Sequence[Bucket],
        holding: Holding,
        trainable: Mapping[str, bool],
        reduce: torch.dtype,
        device: torch.device,
        state_names: Collection[str],
    ) -> None:
        self.model, self.buckets, self.holding, self.trainable = model, buckets, holding, trainable
        self.reduce, self.device = reduce, device
        self.state_names = state_names
        self._orders: list[list[str]] | None = None

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The summed gradients, whole, a bucket at a time. All ranks must go through it."""
        order = [[name for name in names if self.trainable[name]] for names in self._order()]
        yield from self.holding.from_stages(self._own_gradients(), order, lambda name: self.reduce, self.device)

    def _own_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            if not bucket.trainable:
                continue
            yield from self.holding.joined(bucket.assemble(bucket.gradient_packing, bucket.owned_row(self.reduce)))

    def description(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Name, dtype and shape of everything `state` will give, in its order."""
        names = [
            name
            for rank, names in enumerate(self._order())
            for name in names
            if self.holding.stage_ranks(name)[0] == rank
        ]
        weights = [(name, self._dtype(name), self.holding.shapes[name]) for name in names]
        return weights + [(name, tensor.dtype, tensor.shape) for name, tensor in self.replicated()]

    def _order(self) -> list[list[str]]:
        """By stage, its weights as `state` gives them. All ranks must ask the first time."""
        if self._orders is None:
            own, group, names = (
                [w.name for b in self.buckets for w in b.weights],
                self.holding.mesh.group("pp"),
                list(self.trainable),
            )
            self._orders = [own]
            if not group.alone:
                row = torch.full((len(names),), -1, device=self.device)
                row[: len(own)] = torch.tensor([names.index(name) for name in own], device=self.device)
                every = row.new_empty(group.size, len(names))
                group.all_gather(every, row).wait()
                self._orders = [[names[index] for index in numbers if index >= 0] for numbers in every.tolist()]
        return self._orders

    def _dtype(self, name: str) -> torch.dtype:
        return self.holding.placement.weights[name].policy.dtype

    def replicated(self) -> list[tuple[str, Tensor]]:
        """What a stage has whole: buffers, and parameters that are no weights."""
        names = set(self.state_names) - self.trainable.keys()
        if not names:  # most often; a walk through the model takes a fifth of a save's call
            return []
        return [(n, t) for n, t in (*self.model.named_parameters(), *self.model.named_buffers()) if n in names]

    def state(self, values: Mapping[str, Tensor] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Whole weights and buffers under the model's own names, a bucket at a time; shared ones under their first.

        ``values``: by weight or buffer, what stands in for this rank's shard of it. All ranks must go through it.
        """
        values = values or {}
        own = self._own_state(values)
        yield from self.holding.from_stages(own, self._order(), self._dtype, self.device)
        group = self.holding.mesh.group("pp")
        for name, live in self.replicated():
            tensor = values.get(name, live)
            if not group.alone:
                tensor = tensor.contiguous()
                group.broadcast(tensor, self.holding.stage_ranks(name)[0])
            yield name, tensor

    def _own_state(self, values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for bucket in self.buckets:
            row = torch.zeros(bucket.packing.length, dtype=bucket.storage.parameter, device=self.device)
            for weight in bucket.weights:
                bucket.packing.own(weight, row).copy_(values.get(weight.name, weight.shard.data))
            yield from self.holding.joined(bucket.assemble(bucket.packing, row))
