"""Pipeline parallelism: every rank of ``pp`` computes some blocks, and hands the stream on to the next.

Every stage runs the model's own forward. Blocks and modules of other stages are passed by: before a stage's first block
nothing real flows, that block takes what was received, and where the next stage's first block would be called the
forward is left. So positions, masks and whatever else a model prepares for its blocks are there on every stage, what it
does between blocks is done once, and models need no edit.

torch.distributed.pipelining wants each stage as a module of its own and shapes that do not change, and divides the loss
by the number of micro-batches; hence this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from phalanx.errors import WrongUse
from phalanx.losses import Loss
from phalanx.parallel.axes.calls import TIME, shadow, with_stream
from phalanx.parallel.axes.context import ContextParallel
from phalanx.parallel.axes.schedules import Action, Receives, forwards, receives, schedule
from phalanx.parallel.axes.stages import Stages
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.communication.pending import Pending
from phalanx.parallel.randomness.draws import Moment
from phalanx.trees import leaves, mapped

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER = 16
"""Numbers that describe a stream."""
Deferred = list[tuple[nn.Parameter, Tensor, Tensor]]
"""Weights of linears, with their inputs and the gradients of their outputs."""


class StageEnds(BaseException):
    """Leaves a model's forward where the next stage begins. No handler of a model's own may catch it."""

    def __init__(self, stream: Tensor) -> None:
        super().__init__()
        self.stream = stream


@dataclass
class Part:
    """A micro-batch at a stage, from its forward to its backward."""

    stage: int = 0
    micro: int = 0
    entry: Tensor | None = None
    """What was received; its gradient goes back."""
    exit: Tensor | None = None
    """What was sent on; its gradient comes back. None at the last stage, which has the ``result``."""
    gradient: Tensor | None = None
    """Of what was sent on."""
    result: Any = None
    """What was made of the model's output."""


@dataclass(frozen=True)
class Stream:
    """What travels between two stages."""

    items: int
    """0 where blocks give a tensor, else the length of the tuple they give."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    def encoded(self, device: torch.device) -> Tensor:
        numbers = [self.items, DTYPES.index(self.dtype), len(self.shape), *self.shape]
        return torch.tensor(numbers + [0] * (HEADER - len(numbers)), device=device)

    @classmethod
    def decoded(cls, header: Tensor) -> Stream:
        items, dtype, dims, *shape = header.tolist()
        return cls(items, DTYPES[dtype], tuple(shape[:dims]))


class Pipeline:
    """One rank's stages and its neighbours."""

    def __init__(
        self,
        stages: Stages,
        mesh: Mesh,
        name: str,
        moment: Moment,
        parts: Mapping[tuple[int, int], Part],
        device: torch.device,
    ) -> None:
        self.stages, self.mesh, self.name, self.moment, self.device = stages, mesh, name, moment, device
        self._parts = parts
        self.rank = mesh.index("pp")
        self.context: ContextParallel | None = None
        self.active = 0
        """The stage that computes just now."""
        self._part = Part()
        self._next = 0
        """Which block must be called next."""
        self._items = 0
        """0 where blocks give a tensor, else the length of the tuple they give."""
        self._given: list[Any] = []
        """What the active stage's blocks gave beside the stream."""
        self._order = {block: index for index, block in enumerate(b for blocks in stages.blocks for b in blocks)}
        self._streams: dict[tuple[int, Any], Stream] = {}
        """By stage that receives, and by the shapes of a micro-batch."""
        self._posted: dict[Action, tuple[Pending, Tensor]] = {}
        self._sending: list[tuple[Pending, Tensor]] = []
        self._due: Receives = {}
        self._owed: list[Action] = []
        """Of these, what is due and not yet being received."""
        self._signatures: Sequence[Any] = ()
        self._deferred: dict[tuple[int, int], Deferred] = {}
        self._current: Deferred | None = None
        self._checked: set[Any] = set()

    # What modules do

    def shadows(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Before the weights are filled: remember what shape each module outside of the blocks gives."""
        outside = [(n, m) for n, m in model.named_modules() if n in self.stages.places and n not in self._order]
        self._shadows = {n: shadow(m, dtype) for n, m in outside if any(True for _ in m.parameters())}

    def lead(self, model: nn.Module) -> None:
        """Last of all: make every block and module stop, pass by or compute as the active stage says."""
        for name, shapes in self._shadows.items():
            module = model.get_submodule(name)
            module.forward = partial(self._outside, name, shapes, module.forward)
        for name in self._order:
            block = model.get_submodule(name)
            block.forward = partial(self._block, name, block.forward)

    def passes(self, name: str) -> bool:
        """Whether the active stage passes a module by."""
        if name in self._order:
            return name not in self.stages.blocks[self.active]
        if name not in self._shadows:
            return False
        before = self.stages.holders(name) == [0]
        return self.active != (0 if before else self.stages.last)

    def _outside(self, name: str, shapes: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not self.passes(name):
            return forward(*args, **kwargs)
        if self._next > self._order[self.stages.blocks[self.active][-1]]:
            raise WrongUse(
                f"{name} is used after the blocks and registered before them, so pp={self.stages.ranks} put it on the "
                "first stage. Register it after the blocks."
            )
        args, kwargs = mapped(lambda t: t.to("meta"), (args, kwargs))
        return mapped(self._nothing, shapes(*args, **kwargs))

    def _nothing(self, shape: Tensor) -> Tensor:
        """Stands for what another stage has: of the right shape, and not a number wherever it is used."""
        value = float("nan") if shape.is_floating_point() else 0
        return torch.full((), value, dtype=shape.dtype, device=self.device).expand(shape.shape)

    @staticmethod
    def absent(tensor: Tensor) -> bool:
        """Whether a tensor is made of what only another stage has."""
        return tensor.is_floating_point() and bool(tensor.isnan().all())

    def _block(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        own, place = self.stages.blocks[self.active], self._order[name]
        first, last = self._order[own[0]], self._order[own[-1]]
        hidden = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if hidden is None:
            raise WrongUse(f"{name} is called without a tensor, and pp must hand one on. Give it the stream first.")
        if place != self._next:
            raise WrongUse(
                f"{name} is called out of order, so pp={self.stages.ranks} cannot cut the model there. Call blocks one "
                "after another, each once, or use fsdp instead of pp."
            )
        self._next += 1
        if place < first:
            items = self._streams[self.active, self._signatures[self._part.micro]].items
            return hidden if not items else (hidden, *[None] * (items - 1))
        if place > last:
            self._check_given(name, args, kwargs)
            raise StageEnds(hidden)
        if place == first and self.active:
            if hidden.ndim > TIME:
                self.moment.time = hidden.shape[TIME]
                if self.context is not None:
                    self.context.begin(self.moment.time)
            assert self._part.entry is not None
            entry = self._part.entry.clone()  # which a block may change in place
            args, kwargs = with_stream(args, kwargs, entry)
            self._check_others(name, entry, args, kwargs)
        output = forward(*args, **kwargs)
        self._items = len(output) if isinstance(output, tuple) else 0
        self._given += output[1:] if isinstance(output, tuple) else []
        return output

    def _check_given(self, name: str, args: Any, kwargs: Any) -> None:
        """Of what this stage's blocks gave, only the stream may go on to the next."""
        for other in leaves((args, kwargs)):
            if any(other is given for given in self._given):
                raise WrongUse(
                    f"{name} is called with a tensor of shape {tuple(other.shape)} that blocks before it gave beside "
                    f"the stream, and pp={self.stages.ranks} hands on the stream alone. Use fsdp instead of pp."
                )

    def _check_others(self, name: str, entry: Tensor, args: Any, kwargs: Any) -> None:
        """Nothing but the stream may depend on what another stage has."""
        if (self.active, self._signatures[self._part.micro]) in self._checked:
            return
        self._checked.add((self.active, self._signatures[self._part.micro]))
        for other in leaves((args, kwargs)):
            if other is not entry and other.is_floating_point() and bool(other.isnan().any()):
                raise WrongUse(
                    f"{name} is called with a tensor of shape {tuple(other.shape)} that depends on modules before the "
                    f"blocks, and pp={self.stages.ranks} hands on the stream alone. Use fsdp instead of pp."
                )

    # What travels

    def start(self, micro_batches: Sequence[Any], actions: Sequence[Action]) -> None:
        """Before a step: what will be computed, and of what shapes. Nothing is left of one that failed."""
        self._posted.clear()
        self._deferred.clear()
        self._signatures = [tuple(t.shape for t in leaves(micro.tensors)) for micro in micro_batches]
        training = any(action.kind != "forward" for action in actions)
        self._due = receives(self.name, self.stages.ranks, len(micro_batches), training)[self.rank]
        self._owed = []
        self._expect(None)

    def actions(self, micro_batches: int) -> Sequence[Action]:
        return schedule(self.name, self.stages.ranks, micro_batches)[self.rank]

    def forwards(self, micro_batches: int) -> Sequence[Action]:
        return forwards(self.name, self.stages.ranks, micro_batches)[self.rank]

    def enter(self, part: Part, action: Action) -> None:
        """Begin a forward: receive what it works on."""
        self._part, self.active = part, action.stage
        self._next, self._given = 0, []
        if action.stage:
            part.entry = self._received(action).requires_grad_(torch.is_grad_enabled())

    def leave(self, part: Part, exit: Tensor) -> None:
        """End a forward: send on the stream."""
        part.exit, self._given = exit, []
        self._receive_owed()
        known = Stream(self._items, exit.dtype, tuple(exit.shape))
        key = part.stage + 1, self._signatures[part.micro]
        if key not in self._streams:
            self._streams[key] = known
            self._send(known.encoded(self.device), part.stage + 1, "forward")
        elif self._streams[key] != known:
            raise WrongUse(
                f"the stream after {self.stages.blocks[part.stage][-1]} has shape {known.shape} where it had "
                f"{self._streams[key].shape} for the same batch: pp needs shapes that follow from the batch's. "
                "Use fsdp instead of pp."
            )
        self._send(exit.detach().contiguous(), part.stage + 1, "forward")
        self._expect(Action("forward", part.stage, part.micro))

    def await_gradient(self, action: Action) -> None:
        """Before a backward: receive what it begins with."""
        part = self._parts[action.stage, action.micro]
        if part.exit is not None:
            part.gradient = self._received(action)

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
            back = part.entry.grad
            self._receive_owed()
            self._send(torch.zeros_like(part.entry) if back is None else back, part.stage - 1, "backward")
            self._expect(action)

    def deferred(self, action: Action) -> Deferred:
        """The weights' part of a backward."""
        self.active = action.stage
        return self._deferred.pop((action.stage, action.micro))

    def finish(self) -> None:
        """All that was sent has arrived."""
        for pending, _ in self._sending:
            pending.wait()
        self._sending.clear()

    def linear(self, func: Callable[..., Tensor], input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``F.linear``, whose weight's gradient is left for later."""
        if not (torch.is_grad_enabled() and type(weight) is nn.Parameter and weight.requires_grad):
            return func(input, weight, bias)
        return _Linear.apply(input, weight, bias, self)

    def defer(self, weight: nn.Parameter, input: Tensor, gradient: Tensor) -> None:
        assert self._current is not None
        self._current.append((weight, input, gradient))

    def _send(self, tensor: Tensor, stage: int, way: str) -> None:
        self._sending = [(pending, held) for pending, held in self._sending if not pending.over]
        pending = self._lane(stage, way).send(tensor, self._rank_of(stage))
        self._sending.append((pending, tensor))

    def _expect(self, sent: Action | None) -> None:
        """After a send: begin to receive what comes before the next one, as far as its shape is known."""
        self._owed += self._due.get(sent, ())
        while self._owed and (room := self._room(self._owed[0])) is not None:
            self._post(self._owed.pop(0), room)

    def _receive_owed(self, until: Action | None = None) -> None:
        """Begin to receive all that comes before the next send, or before and with the message for one action."""
        while self._owed and until not in self._posted:
            action = self._owed.pop(0)
            room = self._room(action)
            if room is None:
                header = torch.empty(HEADER, dtype=torch.int64, device=self.device)
                self._post(action, header)
                known = Stream.decoded(self._received(action))
                self._streams[action.stage, self._signatures[action.micro]] = known
                room = self._room(action)
            assert room is not None
            self._post(action, room)

    def _post(self, action: Action, tensor: Tensor) -> None:
        source = action.stage - 1 if action.kind == "forward" else action.stage + 1
        lane = self._lane(action.stage, action.kind)
        self._posted[action] = lane.receive(tensor, self._rank_of(source)), tensor

    def _received(self, action: Action) -> Tensor:
        self._receive_owed(until=action)
        pending, tensor = self._posted.pop(action)
        pending.wait()
        return tensor

    def _room(self, action: Action) -> Tensor | None:
        """Memory for what an action waits for, or None if its shape is not known yet."""
        if action.kind == "forward":
            known = self._streams.get((action.stage, self._signatures[action.micro]))
            return None if known is None else torch.empty(known.shape, dtype=known.dtype, device=self.device)
        exit = self._parts[action.stage, action.micro].exit
        assert exit is not None
        return torch.empty_like(exit, memory_format=torch.contiguous_format)

    def _rank_of(self, stage: int) -> int:
        return self.mesh.members(("pp",))[stage % self.stages.ranks]

    def _lane(self, stage: int, way: str) -> Communicator:
        """The group for messages to a stage: two ranks, one direction, so that no message waits for another's turn."""
        return self.mesh.lane(way, stage % self.stages.ranks)


class _Linear(Function):
    """A linear whose weight gets its gradient later."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: nn.Parameter, bias: Tensor | None, pipeline: Pipeline) -> Tensor:
        ctx.save_for_backward(input, weight)
        ctx.weight, ctx.pipeline, ctx.biased = weight, pipeline, bias is not None
        return nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        input, weight = ctx.saved_tensors
        ctx.pipeline.defer(ctx.weight, input, gradient)
        back = gradient @ weight if ctx.needs_input_grad[0] else None
        wanted = ctx.biased and ctx.needs_input_grad[2]
        return back, None, gradient.reshape(-1, gradient.shape[-1]).sum(0) if wanted else None, None


def weight_gradient(input: Tensor, gradient: Tensor) -> Tensor:
    """The part of a linear's backward that was left."""
    return gradient.reshape(-1, gradient.shape[-1]).T @ input.reshape(-1, input.shape[-1])
