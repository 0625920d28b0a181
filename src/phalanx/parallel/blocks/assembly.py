"""Which layers a block has, and in which order.

    stage > enter or leave > random keys > inputs on the host > recompute (perhaps only if the model asks) > probe
    > context > compile > the block's own forward

A stage decides whether a block is called here at all. The stream is sharded and made whole outside of what recompute
does again. Random keys stand outside of recompute, which takes them up again; a probe stands inside, where a call's
draws can be had once more. The compiler sees the block alone, with the collectives of its modules as single steps.
Which results it keeps for backward is its own choice, so ``recompute=selective`` is left to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from phalanx.anatomy import Anatomy
from phalanx.layout import Layout
from phalanx.parallel.axes.context import ContextParallel
from phalanx.parallel.axes.pipeline import Pipeline
from phalanx.parallel.blocks.boundary import Boundary, SequenceSharding
from phalanx.parallel.blocks.compiling import Compile, Uncompiled
from phalanx.parallel.blocks.host_inputs import HostInputs, HostRoom
from phalanx.parallel.blocks.probe import Probe
from phalanx.parallel.blocks.recompute import Recompute, RecomputeIfAsked
from phalanx.parallel.forward.wrapper import Forward, Layer, wrap
from phalanx.parallel.randomness.answers import Answers
from phalanx.parallel.randomness.draws import RandomKeys, Randomness
from phalanx.parallel.randomness.replaced import ReplacedAnswers
from phalanx.parallel.randomness.torch_checkpoint import ModelCheckpoints
from phalanx.precision import cast


@dataclass(frozen=True)
class Blocks:
    """A model's blocks, and what acts on them."""

    model: nn.Module
    anatomy: Anatomy
    layout: Layout
    randomness: Randomness
    sharding: SequenceSharding
    probe: Probe
    context: ContextParallel | None
    pipeline: Pipeline | None

    @cached_property
    def host_room(self) -> HostRoom:
        return HostRoom(self.randomness.device)

    def wrap(self) -> None:
        """Put every block's layers around it, and a stage's around what stands outside of the blocks."""
        answers = Answers if self.layout.compile == "none" else ReplacedAnswers
        self.randomness.answers = answers(self.randomness, self._answered_first())
        self.randomness.checkpointing = ModelCheckpoints(self.randomness, self.model, self.anatomy.blocks)
        self.randomness.expect(self.anatomy.blocks)
        if self.layout.compile == "blocks" and self.layout.ep > 1:
            for name in self.anatomy.experts:
                wrap(self.model.get_submodule(name), Uncompiled())
        for name in self.anatomy.blocks:
            wrap(self.model.get_submodule(name), *self.layers(name))
        if self.pipeline is not None:
            self.pipeline.wrap_outside(self.model)

    def layers(self, name: str) -> Iterator[Layer]:
        """Of a block, outermost first."""
        chain, layout = self.anatomy.chain(name), self.layout
        if self.pipeline is not None:
            yield self.pipeline.layer(name)
        if self.sharding.axes or self.pipeline is not None:
            receive = None if self.pipeline is None else self.pipeline.receive
            yield Boundary(name, self.sharding, name == chain[0], name == chain[-1], receive)
        yield RandomKeys(name, self.randomness)
        if layout.recompute == "host" and self.randomness.device.type != "cpu":
            yield HostInputs(self.host_room, self.randomness.device)
        if layout.recompute in ("full", "host") or (layout.recompute == "selective" and layout.compile == "none"):
            yield Recompute(self.randomness, layout.recompute)
        else:
            yield RecomputeIfAsked(self.randomness)
        if layout.tp * layout.cp * layout.pp * layout.ep > 1:
            yield self.probe.layer(name)
        if self.context is not None:
            yield self.context.layer(name, self.model.get_submodule(name))
        if layout.compile == "blocks":
            yield Compile(self.randomness, self.probe)

    def _answered_first(self) -> dict[Any, Forward]:
        """Functions of torch's that a parallelism answers."""
        found: dict[Any, Forward] = {}
        if self.context is not None:
            found[F.scaled_dot_product_attention] = self.context.sdpa
        if self.pipeline is not None and self.layout.schedule == "zb":
            found[F.linear] = self.pipeline.linear
        return found


def cast_inputs(model: nn.Module, anatomy: Anatomy, dtype: torch.dtype) -> None:
    """Have the model, its blocks and what stands before and after them compute in a dtype."""
    for name in ("", *anatomy.before, *anatomy.blocks, *anatomy.after):
        model.get_submodule(name).register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return cast(args, dtype), cast(kwargs, dtype)
