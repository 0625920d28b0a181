"""Tensor parallelism: every rank of ``tp`` computes some heads, some hidden features and some of the vocabulary.

Between containers the residual stream is cut by time where the plan allows it: gathered on the way into a container,
summed and cut again on the way out, so that norms and dropout are done once a token and not once a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.losses import Logits, Vocabulary, check_ids
from phalanx.parallel import collectives
from phalanx.parallel.calls import TIME, about_sizes, stream, with_stream
from phalanx.parallel.collectives import Group
from phalanx.parallel.cuts import Container, Plan
from phalanx.parallel.differentiable import add_up, gather, run, scatter, share
from phalanx.parallel.randomness import Randomness, Region


class TensorParallel:
    """Makes a model's modules work with their parts."""

    def __init__(self, plan: Plan, model: nn.Module, anatomy: Anatomy, group: Group, randomness: Randomness) -> None:
        self.plan, self.group, self.randomness = plan, group, randomness
        self._way_in: tuple[Tensor, Tensor] | None = None
        for name, inside in plan.columns.items():
            module: Any = model.get_submodule(name)
            module.register_forward_pre_hook(partial(self._into_column, plan.containers[inside]))
            if hasattr(module, "nf"):  # Hugging Face's Conv1D shapes its output by it
                module.nf //= self.group.size()
        for name in plan.rows:
            module = model.get_submodule(name)
            module.forward = partial(self._row, module)
        for name, container in plan.containers.items():
            module = model.get_submodule(name)
            for attribute, value in container.attributes.items():
                setattr(module, attribute, value)
            module.forward = partial(self._container, name, module.forward)
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
            args, kwargs = with_stream(args, kwargs, scatter(hidden, TIME, self.group, alike=True))
        own = slice(*run(moment.length, self.group.size(), self.group.rank()))
        self.randomness.region = Region(self._positions()[own])
        output = forward(*args, **kwargs)
        if last:
            whole = partial(gather, dim=TIME, total=moment.length, group=self.group, alike=True)
            return (whole(output[0]), *output[1:]) if isinstance(output, tuple) else whole(output)
        return output

    def _container(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.plan.by_time:
            length = self.randomness.moment.length
            whole = gather(stream(args, kwargs, name), TIME, length, self.group, alike=False)
            args, kwargs = with_stream(args, kwargs, whole)
        try:
            return forward(*args, **kwargs)
        except RuntimeError as error:
            if not about_sizes(error):
                raise
            raise WrongUse(
                f"{name} cannot work with its part under tp={self.group.size()}: its code fixes sizes that tp cuts "
                f"({str(error).splitlines()[0]}). Use fsdp instead of tp, or leave the module whole: "
                "Anatomy.of(model, splits={...}) with rules for the others."
            ) from error

    def _positions(self) -> Tensor:
        moment = self.randomness.moment
        return torch.arange(moment.time, device=self.randomness.device) if moment.here is None else moment.here

    def _into_column(self, container: Container, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """From here to the row, features are this rank's. Columns of one tensor share a way in, and a sum back."""
        device = self.randomness.device
        heads = None if container.heads is None else torch.arange(*container.heads, device=device)
        features = torch.arange(*container.features, device=device)
        self.randomness.inner = Region(self.randomness.moment.here, features, heads)
        if self.plan.by_time:
            return args
        if self._way_in is None or self._way_in[0] is not args[0]:
            self._way_in = args[0], share(args[0], self.group)
        return (self._way_in[1], *args[1:])

    def _row(self, module: Any, x: Tensor) -> Tensor:
        product = F.linear(x, module.weight) if isinstance(module, nn.Linear) else x @ module.weight
        out = (
            scatter(product, TIME, self.group, alike=False)
            if self.plan.by_time
            else add_up(product, self.group, alike=True)
        )
        self.randomness.inner = self._way_in = None
        return out if module.bias is None else out + module.bias

    def _embedding(self, module: Any, tokens: Tensor) -> Tensor:
        check_ids(tokens, module.num_embeddings, "token")
        start, stop = run(module.num_embeddings, self.group.size(), self.group.rank())
        here = (tokens >= start) & (tokens < stop)
        skipped = module.padding_idx is not None and start <= module.padding_idx < stop
        if stop == start:
            found = module.weight.new_zeros(*tokens.shape, module.embedding_dim) + module.weight.sum()
        else:
            found = F.embedding(
                (tokens - start).where(here, 0), module.weight,
                padding_idx=module.padding_idx - start if skipped else None,
            ).where(here.unsqueeze(-1), 0)  # fmt: skip
        return add_up(found, self.group, alike=True)

    def _head(self, module: Any, x: Tensor) -> Logits:
        size = module.out_features
        return Logits(x, module.weight, module.bias, Vocabulary(
            size=size,
            start=run(size, self.group.size(), self.group.rank())[0],
            share=partial(share, group=self.group),
            gather=partial(gather, dim=-1, total=size, group=self.group, alike=True),
            add_up=self._add_up,
            largest=partial(collectives.largest, group=self.group),
        ))  # fmt: skip

    def _add_up(self, tensor: Tensor) -> None:
        collectives.all_reduce(tensor, self.group).wait()
