"""Tensor parallelism: every rank of ``tp`` computes some heads, some hidden features and some of the vocabulary.

Between containers the residual stream is cut by time where the plan allows it: gathered on the way into a container,
summed and cut again on the way out, so that norms and dropout are done once a token and not once a rank.

Where a container's code does not fit its part, what columns give is gathered instead, and all ranks compute that alike
up to the rows: weights are divided as before, and what is done between them is not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.losses import Logits, Vocabulary, check_ids
from phalanx.parallel.axes.calls import TIME, about_sizes, stream, with_stream
from phalanx.parallel.axes.cuts import Cut, Plan, gather_inside
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import (
    Same,
    all_gather,
    all_reduce,
    reduce_scatter,
    replicate,
    run,
    shard,
)
from phalanx.parallel.randomness.draws import Randomness, Region


class TensorParallel:
    """Makes a model's modules work with their parts."""

    def __init__(
        self, plan: Plan, model: nn.Module, anatomy: Anatomy, group: Communicator, randomness: Randomness
    ) -> None:
        self.plan, self.group, self.randomness = plan, group, randomness
        self._way_in: tuple[Tensor, Tensor] | None = None
        self._orders: dict[Cut, Tensor] = {}
        self._before: dict[str, dict[str, Any]] = {}
        """By container, what its module believed of itself when it was whole."""
        for name, inside in plan.columns.items():
            module: Any = model.get_submodule(name)
            cut = plan.cuts[f"{name}.weight"]
            module.register_forward_pre_hook(partial(self._into_column, inside))
            module.register_forward_hook(partial(self._out_of_column, inside, cut))
            if hasattr(module, "nf"):  # Hugging Face's Conv1D shapes its output by it
                module.nf = sum(stop - start for start, stop in cut.spans[self.group.rank])
        for name in plan.rows:
            module = model.get_submodule(name)
            module.forward = partial(self._row, module, self._container_of(name))
        for name in plan.containers:
            self._prepare_container(name, model.get_submodule(name))
        for name in plan.vocabulary:
            module = model.get_submodule(name)
            module.forward = partial(self._embedding if isinstance(module, nn.Embedding) else self._head, module)
        if plan.by_time:
            for name in anatomy.blocks:
                block = model.get_submodule(name)
                ends = name == anatomy.blocks[0], name == anatomy.blocks[-1]
                block.forward = partial(self._block, name, block.forward, *ends)

    def _block(self, name: str, forward: Callable[..., Any], first: bool, last: bool, *args: Any, **kwargs: Any) -> Any:
        """A block on its run of the time; the first cuts the stream, the last makes it whole."""
        moment = self.randomness.moment
        if first:
            hidden = stream(args, kwargs, name)
            if moment.here is None:
                moment.time = hidden.shape[TIME]
            args, kwargs = with_stream(args, kwargs, shard(hidden, TIME, self.group))
        own = slice(*run(moment.length, self.group.size, self.group.rank))
        self.randomness.region = Region(self._positions()[own])
        output = forward(*args, **kwargs)
        if last:
            whole = partial(all_gather, dim=TIME, total=moment.length, group=self.group, to="invariant")
            return (whole(output[0]), *output[1:]) if isinstance(output, tuple) else whole(output)
        return output

    def _container_of(self, row: str) -> str:
        return max((name for name in self.plan.containers if row.startswith(name + ".")), key=len)

    def _prepare_container(self, name: str, module: Any) -> None:
        container = self.plan.containers[name]
        beliefs: dict[str, Any] = dict(container.attributes)
        if container.config:
            beliefs["config"] = copy.copy(module.config)
            vars(beliefs["config"]).update(container.config)
        self._before[name] = {attribute: getattr(module, attribute) for attribute in beliefs}
        for attribute, value in beliefs.items():
            setattr(module, attribute, value)
        module.forward = partial(self._container, name, module, module.forward)

    def _container(self, name: str, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        whole, gathered, draws = (args, kwargs), self.plan.containers[name].gathered, self.randomness.calls
        if self.plan.by_time:
            length = self.randomness.moment.length
            to: Same = "invariant" if gathered else "replicated"
            hidden = all_gather(stream(args, kwargs, name), TIME, length, self.group, to=to)
            args, kwargs = with_stream(args, kwargs, hidden)
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, ZeroDivisionError) as error:
            if gathered or not about_sizes(error):
                raise
            told = str(error).splitlines()[0]
        for attribute, value in self._before[name].items():
            setattr(module, attribute, value)
        gather_inside(self.plan, name, f"the code of {name} fixes sizes ({told})")
        self.randomness.inner = self._way_in = None
        self.randomness.calls = draws
        return self._container(name, module, forward, *whole[0], **whole[1])

    def _positions(self) -> Tensor:
        moment = self.randomness.moment
        return torch.arange(moment.time, device=self.randomness.device) if moment.here is None else moment.here

    def _into_column(self, inside: str, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """From here to the row, features are this rank's. Columns of one tensor share a way in, and a sum back."""
        container, device = self.plan.containers[inside], self.randomness.device
        if container.gathered:
            self.randomness.inner = Region(self.randomness.moment.here)  # all heads and features
        else:
            rank = self.group.rank
            heads = torch.arange(*container.heads[rank], device=device) if container.heads else None
            features = torch.arange(*container.features[rank], device=device)
            self.randomness.inner = Region(self.randomness.moment.here, features, heads)
            if self.plan.by_time:
                return args
        if self._way_in is None or self._way_in[0] is not args[0]:
            self._way_in = args[0], replicate(args[0], self.group)
        return (self._way_in[1], *args[1:])

    def _out_of_column(self, inside: str, cut: Cut, module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        """Everybody's features, in order, where they are gathered."""
        if not self.plan.containers[inside].gathered:
            return None
        sizes = [sum(stop - start for start, stop in spans) for spans in cut.spans]
        padded = F.pad(output, [0, max(sizes) - output.shape[-1]])
        every = all_gather(padded, -1, max(sizes) * len(sizes), self.group, to="invariant")
        if cut not in self._orders:
            places: dict[int, int] = {}
            for rank, spans in enumerate(cut.spans):
                held = (feature for start, stop in spans for feature in range(start, stop))
                for index, feature in enumerate(held):
                    places.setdefault(feature, rank * max(sizes) + index)
            self._orders[cut] = torch.tensor([places[f] for f in sorted(places)], device=output.device)
        return every.index_select(-1, self._orders[cut])

    def _row(self, module: Any, inside: str, x: Tensor) -> Tensor:
        if self.plan.containers[inside].gathered:
            x = shard(x, -1, self.group)
        product = F.linear(x, module.weight) if isinstance(module, nn.Linear) else x @ module.weight
        out = (
            reduce_scatter(product, TIME, self.group)
            if self.plan.by_time
            else all_reduce(product, self.group, to="invariant")
        )
        self.randomness.inner = self._way_in = None
        return out if module.bias is None else out + module.bias

    def _embedding(self, module: Any, tokens: Tensor) -> Tensor:
        check_ids(tokens, module.num_embeddings, "token")
        start, stop = run(module.num_embeddings, self.group.size, self.group.rank)
        here = (tokens >= start) & (tokens < stop)
        skipped = module.padding_idx is not None and start <= module.padding_idx < stop
        if stop == start:
            found = module.weight.new_zeros(*tokens.shape, module.embedding_dim) + module.weight.sum()
        else:
            found = F.embedding(
                (tokens - start).where(here, 0), module.weight,
                padding_idx=module.padding_idx - start if skipped else None,
            ).where(here.unsqueeze(-1), 0)  # fmt: skip
        return all_reduce(found, self.group, to="invariant")

    def _head(self, module: Any, x: Tensor) -> Logits:
        size = module.out_features
        return Logits(x, module.weight, module.bias, Vocabulary(
            size=size,
            start=run(size, self.group.size, self.group.rank)[0],
            share=partial(replicate, group=self.group),
            gather=partial(all_gather, dim=-1, total=size, group=self.group, to="invariant"),
            add_up=self._add_up,
            largest=self.group.all_reduce_max,
        ))  # fmt: skip

    def _add_up(self, tensor: Tensor) -> None:
        self.group.all_reduce(tensor).wait()
