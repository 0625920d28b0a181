"""Pipeline parallelism: every rank of ``pp`` computes some blocks, and hands the stream on to the next.

Every stage runs the model's own forward. Blocks and modules of other stages are passed by: before a stage's first block
nothing real flows, that block takes what was received, and where the next stage's first block would be called the
forward is left. So positions, masks and whatever else a model prepares for its blocks are there on every stage, what it
does between blocks is done once, and models need no edit.

torch.distributed.pipelining wants each stage as a module of its own and shapes that do not change, and divides the loss
by the number of micro-batches; hence this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.errors import WrongUse
from phalanx.losses import Loss
from phalanx.parallel.axes.elsewhere import given
from phalanx.parallel.axes.later import LaterLinear, known, linear
from phalanx.parallel.axes.schedules import Action, forwards, schedule
from phalanx.parallel.axes.stages import Stages
from phalanx.parallel.axes.transfers import Part, Transfers
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.forward.calls import shadow, with_stream
from phalanx.parallel.forward.wrapper import Around, Forward, Layer, wrap
from phalanx.trees import leaves, mapped

Deferred = list[tuple[nn.Parameter, Tensor, Tensor]]
"""Weights of linears, with their inputs and the gradients of their outputs."""


class StageEnds(BaseException):
    """Leaves a model's forward where the next stage begins. No handler of a model's own may catch it."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


class Pipeline:
    """One rank's stages and its neighbours."""

    def __init__(
        self,
        stages: Stages,
        mesh: Mesh,
        name: str,
        parts: Mapping[tuple[int, int], Part],
        device: torch.device,
        narrow: Narrow,
    ) -> None:
        """``narrow``: how the stream is made small on its way."""
        self.stages, self.name, self.device = stages, name, device
        self._parts = parts
        self.transfers = Transfers(stages, mesh, name, parts, device, narrow)
        self.rank = mesh.index("pp")
        self.active = 0
        """The stage that computes just now."""
        self._part = Part()
        self._next = 0
        """Which block must be called next."""
        self._items = 0
        """0 where blocks give a tensor, else the length of the tuple they give."""
        self._passed_by: list[str] = []
        """Modules outside of the blocks that this forward has passed by."""
        self._given: list[Any] = []
        """What the active stage's blocks gave beside the stream."""
        self._stage_of = {block: stage for stage, blocks in enumerate(stages.blocks) for block in blocks}
        """By block, and by module outside of them that only one stage has."""
        self._order = {block: index for index, block in enumerate(b for blocks in stages.blocks for b in blocks)}
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._current: Deferred | None = None
        self._checked: set[Any] = set()
        self.weights: dict[tuple[int, int], nn.Parameter] = {}
        """By storage."""
        self._known = known(self)

    # What modules do

    def shadows(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Before the weights are filled: remember what shape each module outside of the blocks gives."""
        outside = {n: m for n, m in model.named_modules() if n in self.stages.places and n not in self._order}
        called = (each for name, module in outside.items() for each in _called(name, module))
        self._shadows = {n: shadow(m, dtype) for n, m in called if any(True for _ in m.parameters())}
        for name in self._shadows:
            self._stage_of[name] = 0 if self.stages.holders(name) == [0] else self.stages.last

    def wrap_outside(self, model: nn.Module) -> None:
        """Make modules outside of the blocks pass by or compute as the active stage says."""
        for name, shapes in self._shadows.items():
            wrap(model.get_submodule(name), Around(self._title(name), self._outside, name, shapes))

    def layer(self, name: str) -> Layer:
        """Makes a block stop, pass by or compute as the active stage says."""
        return Around(self._title(name), self._block, name)

    def _title(self, name: str) -> str:
        return f"stage {self._stage_of[name]}"

    def passes(self, name: str) -> bool:
        """Whether the active stage passes a module by."""
        return self._stage_of.get(name, self.active) != self.active

    @property
    def real(self) -> bool:
        """Whether what is computed now is the active stage's: before its first block only the first stage's is."""
        return not self.active or self._next > self._order[self.stages.blocks[self.active][0]]

    def _outside(self, forward: Forward, name: str, shapes: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self.passes(name):
            return forward(*args, **kwargs)
        if self._next > self._order[self.stages.blocks[self.active][-1]]:
            raise WrongUse(
                f"{name} is used after the blocks and registered before them, so pp={self.stages.ranks} put it on the "
                "first stage. Register it after the blocks."
            )
        self._passed_by.append(name)
        return mapped(self._nothing, given(name, shapes, self.device, args, kwargs))

    def _nothing(self, shape: Tensor) -> Tensor:
        """Stands for what another stage has: of the right shape, and not a number wherever it is used.

        It has memory of its own, since a model may write to it in place. Whole numbers that are known stay as they are.
        """
        if not shape.is_floating_point():
            return torch.zeros_like(shape, device=self.device) if shape.is_meta else shape
        return torch.full(shape.shape, float("nan"), dtype=shape.dtype, device=self.device)

    @staticmethod
    def absent(tensor: Tensor) -> bool:
        """Whether a tensor is made of what only another stage has."""
        return tensor.is_floating_point() and bool(tensor.isnan().all())

    def _block(self, forward: Forward, name: str, *args: Any, **kwargs: Any) -> Any:
        own, place = self.stages.blocks[self.active], self._order[name]
        hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if hidden is None:
            raise WrongUse(f"{name} is called without a tensor, and pp must hand one on. Give it the stream first.")
        if place != self._next:
            raise WrongUse(
                f"{name} is called out of order, so pp={self.stages.ranks} cannot cut the model there. Call blocks one "
                "after another, each once, or use fsdp instead of pp."
            )
        self._next += 1
        if place < self._order[own[0]]:
            items = self.transfers.items(self._part)
            return hidden if not items else (hidden, *[None] * (items - 1))
        if place > self._order[own[-1]]:
            self._check_given(name, args, kwargs)
            raise StageEnds(hidden)
        if not self.active and place == self._order[own[0]] and self._passed_by:
            self._check_first(name, args, kwargs)
        output = forward(*args, **kwargs)
        self._items = len(output) if isinstance(output, tuple) else 0
        self._given += output[1:] if isinstance(output, tuple) else []
        return output

    def receive(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """A call of a stage's first block with what was received as the stream; None for other blocks."""
        if self._part.entry is None or name != self.stages.blocks[self.active][0]:
            return None
        entry = self._part.entry.clone()  # which a block may change in place
        args, kwargs = with_stream(args, kwargs, entry)
        self._check_others(name, entry, args, kwargs)
        return args, kwargs

    def _check_given(self, name: str, args: Any, kwargs: Any) -> None:
        """Of what this stage's blocks gave, only the stream may go on to the next."""
        for other in leaves((args, kwargs)):
            if any(other is given for given in self._given):
                raise WrongUse(
                    f"{name} is called with a tensor of shape {tuple(other.shape)} that blocks before it gave beside "
                    f"the stream, and pp={self.stages.ranks} hands on the stream alone. Use fsdp instead of pp."
                )

    def _check_first(self, name: str, args: Any, kwargs: Any) -> None:
        """Nothing that the first block is called with may depend on what the last stage has."""
        shapes = self.active, self.transfers.signature(self._part)
        if shapes in self._checked:
            return
        self._checked.add(shapes)
        for tensor in leaves((args, kwargs), Tensor):
            if tensor.is_floating_point() and bool(tensor.isnan().any()):
                raise WrongUse(
                    f"{name} is called with a tensor of shape {tuple(tensor.shape)} that depends on modules registered "
                    f"after the blocks, which pp={self.stages.ranks} put on the last stage (called before the blocks: "
                    f"{', '.join(self._passed_by)}). Register before the blocks what is used before them, or use fsdp "
                    "instead of pp."
                )

    def _check_others(self, name: str, entry: Tensor, args: Any, kwargs: Any) -> None:
        """Nothing but the stream may depend on what another stage has."""
        shapes = self.active, self.transfers.signature(self._part)
        if shapes in self._checked:
            return
        self._checked.add(shapes)
        for other in leaves((args, kwargs), Tensor):
            if other is not entry and other.is_floating_point() and bool(other.isnan().any()):
                raise WrongUse(
                    f"{name} is called with a tensor of shape {tuple(other.shape)} that depends on modules before the "
                    f"blocks, and pp={self.stages.ranks} hands on the stream alone. Use fsdp instead of pp."
                )

    # What a stage does

    def start(self, micro_batches: Sequence[Any], actions: Sequence[Action]) -> None:
        """Before a step: what will be computed. Nothing is left of one that failed."""
        self._deferred.clear()
        self.transfers.start(micro_batches, actions)

    def actions(self, micro_batches: int) -> Sequence[Action]:
        return schedule(self.name, self.stages.ranks, micro_batches)[self.rank]

    def forwards(self, micro_batches: int) -> Sequence[Action]:
        return forwards(self.name, self.stages.ranks, micro_batches)[self.rank]

    def enter(self, part: Part, action: Action) -> None:
        """Begin a forward: receive what it works on."""
        self._part, self.active = part, action.stage
        self._next, self._given, self._passed_by = 0, [], []
        if action.stage:
            part.entry = self.transfers.received(action).requires_grad_(torch.is_grad_enabled())

    def leave(self, part: Part, exit: Tensor) -> None:
        """End a forward: send on the stream."""
        part.exit, self._given = exit, []
        self.transfers.send_stream(part, self._items)

    def await_gradient(self, action: Action) -> None:
        """Before a backward: receive what it begins with."""
        part = self._parts[action.stage, action.micro]
        if part.exit is not None:
            part.gradient = self.transfers.received(action)

    def backward(self, part: Part, action: Action, factor: float) -> None:
        """A stage's backward: from the loss, times ``factor``, or from the gradient that came back."""
        self.active = action.stage
        self._current = self._deferred.setdefault((action.stage, action.micro), [])
        if part.exit is None:
            loss: Loss = part.result
            (loss.total * factor).backward()
        else:
            gradient, part.gradient = part.gradient, None
            if part.exit.requires_grad:
                part.exit.backward(gradient)
        self._current = None
        if part.entry is not None:
            self.transfers.send_gradient(part, action)

    def deferred(self, action: Action) -> Deferred:
        """The weights' part of a backward."""
        self.active = action.stage
        return self._deferred.pop((action.stage, action.micro))

    def finish(self) -> None:
        """All that was sent has arrived, and nothing is kept of what was computed: its graph would keep all of us."""
        self.transfers.finish()
        self._part, self._given = Part(), []

    def linear(self, func: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear``, whose weight's gradient is left for later."""
        if not (torch.is_grad_enabled() and type(weight) is nn.Parameter and weight.requires_grad):
            return func(input, weight, bias)
        if not torch.compiler.is_compiling():
            return _Linear.apply(input, weight, bias, self)
        if not input.requires_grad:
            return func(input, weight, bias)  # there is nothing to leave it behind
        return LaterLinear.apply(input, weight, bias, self._known)

    def left(self, weight: tuple[int, int], input: Tensor, gradient: Tensor) -> None:
        """What a compiled block has left, of a weight by its place in memory."""
        self.defer(self.weights[weight], input, gradient)

    def defer(self, weight: nn.Parameter, input: Tensor, gradient: Tensor) -> None:
        assert self._current is not None
        self._current.append((weight, input, gradient))


class _Linear(Function):
    """A linear whose weight gets its gradient later."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: nn.Parameter, bias: Tensor | None, pipeline: Pipeline) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.weight, ctx.pipeline, ctx.biased = weight, pipeline, bias is not None
        return linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        ctx.pipeline.defer(ctx.weight, input, gradient)
        back = gradient @ weight if ctx.needs_input_grad[0] else None
        wanted = ctx.biased and ctx.needs_input_grad[2]
        return back, None, gradient.reshape(-1, gradient.shape[-1]).sum(0) if wanted else None, None


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What is called of a module: itself, or what a list or a dict has, which are no functions."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield name, module
        return
    for child, inner in module.named_children():
        yield from _called(f"{name}.{child}", inner)


def weight_gradient(input: Tensor, gradient: Tensor) -> Tensor:
    """The part of a linear's backward that was left."""
    return gradient.reshape(-1, gradient.shape[-1]).T @ input.reshape(-1, input.shape[-1])
