"""Tensor parallelism: every rank of ``tp`` computes some heads, some hidden features and some of the vocabulary.

Between containers the residual stream is cut by time where the plan allows it: gathered on the way into a container,
summed and cut again on the way out, so that norms and dropout are done once a token and not once a rank.

Where a container's code does not fit its part, what columns give is gathered instead, and all ranks compute that alike
up to the rows: weights are divided as before, and what is done between them is not.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.kernels.linear_cross_entropy import Vocabulary, check_ids
from phalanx.layout import Layout
from phalanx.logits import Logits
from phalanx.parallel.axes import adapters, overlap
from phalanx.parallel.axes.cuts import Cut, Plan, gather_inside
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.differentiable import (
    Behind,
    Same,
    all_gather,
    all_reduce,
    awaited,
    reduce_scatter,
    replicate,
    run,
    shard,
)
from phalanx.parallel.communication.narrow import EXACTLY, Narrow
from phalanx.parallel.forward.calls import TIME, about_sizes, stream, with_stream
from phalanx.parallel.forward.fp8 import is_plain, product
from phalanx.parallel.forward.wrapper import Around, Forward, Instead, wrap
from phalanx.parallel.randomness.draws import Randomness


@dataclass
class Inside:
    """A container on this rank. Modules have the object, not its name: to a compiler all containers are alike."""

    name: str
    module: nn.Module
    gathered: bool
    """Whether what columns give is gathered."""
    features: Tensor
    heads: Tensor | None
    """This rank's."""
    before: dict[str, Any] = field(default_factory=dict)
    """What its module believed of itself when it was whole."""
    linears: list[nn.Linear] = field(default_factory=list)
    """Whose weights' gradients may be computed while the gradient of its input is summed."""
    late: dict[nn.Module, overlap.LateWeight] = field(default_factory=dict)
    """By linear, its weight in the call that is under way."""


class GatheredColumns:
    """Where the features of column-parallel linears are that are cut alike, once they are gathered."""

    def __init__(self, cut: Cut, device: torch.device) -> None:
        self.sizes = [sum(stop - start for start, stop in spans) for spans in cut.spans]
        """By rank, how many."""
        places: dict[int, int] = {}
        for rank, spans in enumerate(cut.spans):
            held = (feature for start, stop in spans for feature in range(start, stop))
            for index, feature in enumerate(held):
                places.setdefault(feature, rank * max(self.sizes) + index)
        self.order = torch.tensor([places[f] for f in sorted(places)], device=device)


class TensorParallel:
    """Makes a model's modules work with their parts."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        group: Communicator,
        randomness: Randomness,
        layout: Layout,
        narrow: Narrow = EXACTLY,
    ) -> None:
        """``narrow``: how the stream is made small on its way into a container, and what it gives on its way out."""
        self.plan, self.group, self.randomness, self.narrow = plan, group, randomness, narrow
        self.activations = randomness.activations
        self._way_in: tuple[Tensor, Tensor] | None = None
        self._gathered_last: Tensor | None = None
        self.containers = {name: self._container_of(name, model.get_submodule(name)) for name in plan.containers}
        self.columns: dict[Cut, GatheredColumns] = {}
        for name in (*plan.columns, *plan.rows) if overlap.possible(layout) else ():
            if is_plain(linear := model.get_submodule(name)):
                self.containers[self._container_name(name)].linears.append(linear)
        for name, container in plan.columns.items():
            module: Any = model.get_submodule(name)
            cut = plan.cuts[f"{name}.weight"]
            if cut not in self.columns:
                self.columns[cut] = GatheredColumns(cut, randomness.device)
            wrap(module, Around("column-parallel", self._column, module, self.containers[container], self.columns[cut]))
            if (dropout := adapters.dropout(module)) is not None:
                wrap(dropout, Around("whole features", self._whole_features))
            if hasattr(module, "nf"):  # Hugging Face's Conv1D shapes its output by it
                module.nf = sum(stop - start for start, stop in cut.spans[self.group.rank])
        for name in (*plan.columns, *plan.rows):
            module, cut = model.get_submodule(name), plan.cuts[f"{name}.weight"]
            if hasattr(module, "divide"):  # its weight is kept in few bits
                module.divide(cut.dim, cut.spans[group.rank])
        for row in plan.rows:
            module = model.get_submodule(row)
            wrap(module, Instead("row-parallel", self._row, module, self.containers[self._container_name(row)]))
        for inside in self.containers.values():
            self._prepare_container(inside)
        for name in plan.vocabulary:
            module = model.get_submodule(name)
            own = self._embedding if isinstance(module, nn.Embedding) else self._head
            wrap(module, Instead("vocabulary-parallel", own, module))

    def _container_name(self, linear: str) -> str:
        return max((name for name in self.plan.containers if linear.startswith(name + ".")), key=len)

    def _container_of(self, name: str, module: nn.Module) -> Inside:
        container, device, rank = self.plan.containers[name], self.randomness.device, self.group.rank
        heads = torch.arange(*container.heads[rank], device=device) if container.heads else None
        features = torch.arange(*container.features[rank], device=device)
        return Inside(name, module, bool(container.gathered), features, heads)

    def _prepare_container(self, inside: Inside) -> None:
        container, module = self.plan.containers[inside.name], inside.module
        beliefs: dict[str, Any] = dict(container.attributes)
        if container.config:
            beliefs["config"] = copy.copy(module.config)
            vars(beliefs["config"]).update(container.config)
        inside.before = {attribute: getattr(module, attribute) for attribute in beliefs}
        for attribute, value in beliefs.items():
            setattr(module, attribute, value)
        wrap(module, Around("tensor-parallel", self._container, inside))

    def _container(self, forward: Forward, inside: Inside, *args: Any, **kwargs: Any) -> Any:
        draws = self.randomness.calls
        own, also = self._into(inside, args, kwargs)
        if torch.compiler.is_compiling():  # it has been tried, and fits
            return forward(*own, **also)
        try:
            return forward(*own, **also)
        except (RuntimeError, ZeroDivisionError) as error:
            if inside.gathered or not about_sizes(error):
                raise
            told = str(error).splitlines()[0]
        for attribute, value in inside.before.items():
            setattr(inside.module, attribute, value)
        gather_inside(self.plan, inside.name, f"the code of {inside.name} fixes sizes ({told})")
        inside.gathered = True
        self._turn_outside()
        self.randomness.calls = draws
        return self._container(forward, inside, *args, **kwargs)

    def _into(self, inside: Inside, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a container is called with: the stream over all of time."""
        if not self.plan.sequence_parallel:
            return args, kwargs
        to: Same = "invariant" if inside.gathered else "replicated"
        own, held = stream(args, kwargs, inside.name), self.activations.stream.held
        own, behind = (own, None) if inside.gathered else self._enter(inside, own, held)
        whole = all_gather(own, TIME, held, self.group, to=to, behind=behind, narrow=self._narrow(inside))
        return with_stream(args, kwargs, whole)

    def _narrow(self, inside: Inside) -> Narrow:
        """Where columns are gathered, all is sent as it is."""
        return EXACTLY if inside.gathered else self.narrow

    def _enter(self, inside: Inside, x: Tensor, time: int) -> tuple[Tensor, Behind | None]:
        """Before what sums the gradient of ``x``, all of its ``time``: what autograd does meanwhile, alike on ranks."""
        if not inside.linears:  # as in compiled blocks, where sizes are no numbers
            return x, None
        inside.late.clear()
        size = time * x.transpose(0, TIME).shape[1:].numel() * x.element_size()  # a rank's own part may be shorter
        if not x.requires_grad or not torch.is_grad_enabled() or size < overlap.LEAST_BYTES:
            return x, None
        behind = Behind()
        x = awaited(x, behind)
        for linear in inside.linears:
            if linear.weight.requires_grad:
                inside.late[linear] = overlap.LateWeight(linear.weight)
        return x, behind

    def _column(self, forward: Forward, module: Any, inside: Inside, columns: GatheredColumns, *args: Any) -> Tensor:
        args, late = self._into_column(inside, args), inside.late.get(module)
        output = forward(*args) if late is None else late.linear(args[0], module.bias)
        return self._gathered(columns, output) if inside.gathered else output

    def _whole_features(self, forward: Forward, x: Tensor) -> Tensor:
        """What goes into a column has all features of the stream, and draws are those of them."""
        with self.activations.handed(self.activations.stream, self.activations.stream.inside(None, None)):
            return forward(x)

    def _into_column(self, inside: Inside, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """From here to the row, features are this rank's. Columns of one tensor share a way in, and a sum back."""
        layout = self.activations.stream
        if inside.gathered:
            self.activations.turn_inside(layout.inside(None, None))  # all heads and features
        else:
            self.activations.turn_inside(layout.inside(inside.features, inside.heads))
            if self.plan.sequence_parallel:
                return args
        if self._way_in is None or self._way_in[0] is not args[0]:
            x, behind = self._enter(inside, args[0], args[0].shape[TIME])
            self._way_in = args[0], replicate(x, self.group, behind, self._narrow(inside))
        return (self._way_in[1], *args[1:])

    def _turn_outside(self) -> None:
        """From a row on, activations are the stream's again."""
        self.activations.turn_outside()
        self._way_in = self._gathered_last = None

    def _gathered(self, columns: GatheredColumns, output: Tensor) -> Tensor:
        """Everybody's features, in order."""
        sizes = columns.sizes
        padded = F.pad(output, [0, max(sizes) - output.shape[-1]])
        total, after = max(sizes) * len(sizes), self._gathered_last
        every = all_gather(padded, -1, total, self.group, to="invariant", after=after)
        if torch.compiler.is_compiling():
            self._gathered_last = every.detach()
        return every.index_select(-1, columns.order)

    def _row(self, module: Any, inside: Inside, x: Tensor) -> Tensor:
        if inside.gathered:
            x = shard(x, -1, self.group)
        out = self._row_sum(module, x, inside.late.get(module), self._narrow(inside))
        inside.late.clear()
        self._turn_outside()
        return out if module.bias is None else out + module.bias

    def _row_sum(self, module: Any, x: Tensor, late: overlap.LateWeight | None, narrow: Narrow) -> Tensor:
        """What a row-parallel linear gives, before its bias, summed over ranks."""
        chunks = 1 if late is None else overlap.chunks_of(x, module.out_features, self.group)
        if late is not None and chunks > 1 and self.plan.sequence_parallel:
            return late.scattered(x, self.group, chunks, narrow)
        part = product(module, x) if late is None else late.linear(x, None)
        if self.plan.sequence_parallel:
            return reduce_scatter(part, TIME, self.group, narrow)
        return all_reduce(part, self.group, to="invariant", narrow=narrow)

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
            largest=-(-size // self.group.size),
            replicate=partial(replicate, group=self.group),
            all_gather=partial(all_gather, dim=-1, total=size, group=self.group, to="invariant"),
            all_reduce=self._all_reduce,
            all_reduce_max=self.group.all_reduce_max,
        ))  # fmt: skip

    def _all_reduce(self, tensor: Tensor) -> None:
        self.group.all_reduce(tensor).wait()
