"""A probe: the first time a block trains, it also runs as one device would run it, and must give the same.

tp and cp read off a model's names and structure what its blocks do. What cannot be read, such as positions that a block
makes for itself or tokens that it mixes by hand, would be wrong and say nothing; so it is tried, once, with a batch,
the weights and the draws of the first step, and refused. Nothing is kept of it for a backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from phalanx.anatomy import Anatomy
from phalanx.errors import WrongUse
from phalanx.layout import Layout
from phalanx.parallel.axes import batchnorm
from phalanx.parallel.blocks.boundary import SequenceSharding
from phalanx.parallel.blocks.fp8 import Fp8
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.forward.calls import first_tensor, shadow, with_stream
from phalanx.parallel.forward.wrapper import Around, Forward, Layer
from phalanx.parallel.randomness.draws import Randomness
from phalanx.parallel.torch_private import FakeTensor, install
from phalanx.parallel.weights.holding import Holding
from phalanx.parallel.weights.weight import Weight

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""Relative, by the dtype of the stream; others are half precisions."""
HALF = 0.1


class Probe:
    """Blocks as one device has them, until each has been tried."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, layout: Layout, dtype: torch.dtype) -> None:
        """Made before anything about the model is changed."""
        self.anatomy, self.layout = anatomy, layout
        axes = [f"{axis}={getattr(layout, axis)}" for axis in ("tp", "cp", "ep") if getattr(layout, axis) > 1]
        self.axes = ",".join(axes)
        self.shadows: dict[str, nn.Module] = {}
        for name in anatomy.blocks if axes else ():
            block = model.get_submodule(name)
            if any(isinstance(module, batchnorm.KINDS) for module in block.modules()):
                continue  # it sees other ranks' samples
            self.shadows[name] = shadow(block, dtype)

    def start(
        self,
        model: nn.Module,
        weights: Mapping[str, Weight],
        holding: Holding,
        randomness: Randomness,
        sharding: SequenceSharding,
        fp8: Fp8 | None,
        narrow: Narrow,
    ) -> None:
        """What it needs to know of the model as it has been spread. ``narrow``: how ranks send inside of blocks."""
        self.model, self.weights, self.holding, self.randomness = model, weights, holding, randomness
        self.sharding, self.fp8, self.narrow = sharding, fp8, narrow
        self.untried, self.unseen = set(self.shadows), set(self.anatomy.blocks)
        self.trying = False
        self.compares = True
        """Whether blocks are held against one device, or only run, so that what running them tells is known."""

    def layer(self, name: str) -> Layer:
        """Tries a block the first time."""
        return Around("probe", self._block, name)

    def _block(self, forward: Forward, name: str, *args: Any, **kwargs: Any) -> Any:
        if self.trying and name in self.untried:
            self.untried.remove(name)
            return self._try(name, forward, args, kwargs)
        output = forward(*args, **kwargs)
        if name in self.unseen and torch.is_grad_enabled():
            self.unseen.remove(name)
            self._refuse_hidden_outputs(name)
        return output

    @contextmanager
    def trial(self) -> Iterator[None]:
        """While a batch goes through the model for blocks to be tried; it counts for nothing else."""
        self.trying = True
        as_alone = nullcontext() if self.fp8 is None else self.fp8.off()
        moment = self.randomness.moment
        with torch.no_grad(), moment.recompute(dict(vars(moment))), as_alone, self.narrow.off():
            yield
        self.trying = False
        self.untried.clear()
        self.shadows.clear()

    def _try(self, name: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        if not self.compares:
            return forward(*args, **kwargs)
        whole, draws = self.sharding.unshard(first_tensor(args, kwargs)), self.randomness.calls
        output = forward(*args, **kwargs)
        expected = self._alone(name, draws, *with_stream(args, kwargs, whole))
        self._compare(name, _stream_of(output), self.sharding.shard(expected))
        return output

    def _alone(self, name: str, draws: int, args: Any, kwargs: Any) -> Tensor:
        """What the block gives on one device, in the same scope and with the same draws."""
        alone, block = self.shadows.pop(name), self.model.get_submodule(name)
        for inner, own in alone.named_modules():
            real = block.get_submodule(inner)
            own.training = real.training
            for attribute, _ in list(own.named_parameters(recurse=False, remove_duplicate=False)):
                full = f"{name}.{inner}.{attribute}" if inner else f"{name}.{attribute}"
                install(own, attribute, nn.Parameter(self._weight(full), requires_grad=False))
            for attribute, value in real.named_buffers(recurse=False):
                setattr(own, attribute, value.clone())
            for attribute, value in vars(own).items():
                if isinstance(value, FakeTensor):
                    vars(own)[attribute] = getattr(real, attribute)
        with self.randomness.again(draws):
            return _stream_of(alone(*args, **kwargs))

    def _weight(self, name: str) -> Tensor:
        name = self.anatomy.tied.get(name, name)
        return next(self.holding.joined(iter([(name, self.weights[name].full.data)])))[1].clone()

    def _compare(self, name: str, found: Tensor, expected: Tensor) -> None:
        tolerance = TOLERANCE.get(found.dtype, HALF)
        alike = found.shape == expected.shape
        off = float((found.detach() - expected).norm() / expected.norm().clamp_min(1e-30)) if alike else float("inf")
        if expected.numel() and not off <= tolerance:
            raise WrongUse(
                f"{name} gives something else under {self.axes} than on one device (relative difference {off:.1e}). It "
                "does what cannot be seen from outside: makes its own positions, mixes tokens by hand, counts on sizes "
                "that are cut. Give it positions from outside and attention through scaled_dot_product_attention, or "
                "use fsdp and pp instead."
            )

    def _refuse_hidden_outputs(self, name: str) -> None:
        """A tensor left on a module would be this rank's part alone."""
        for inner, module in self.model.get_submodule(name).named_modules(prefix=name):
            for attribute, value in vars(module).items():
                if isinstance(value, Tensor) and value.grad_fn is not None:
                    raise WrongUse(
                        f"{inner} leaves a tensor in its attribute {attribute!r}, where under {self.layout} the loss "
                        "would find one rank's part of it. Bind it to the stream with phalanx.losses.penalised instead."
                    )


def _stream_of(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output
