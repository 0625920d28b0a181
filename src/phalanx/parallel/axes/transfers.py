"""What pipeline stages send each other: the stream forward, its gradient backward.

Messages of two ranks in one direction have a lane of their own. What is due is being received as early as its shape is
known: the first of a shape is announced by a header.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx.errors import WrongUse
from phalanx.parallel.axes.schedules import Action, Receives, receives
from phalanx.parallel.axes.stages import Stages
from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.mesh import Mesh
from phalanx.parallel.communication.narrow import Narrow
from phalanx.parallel.communication.pending import Pending
from phalanx.trees import leaves

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
HEADER = 16
"""Numbers that describe a stream."""


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


class Transfers:
    """One rank's messages from and to its neighbours."""

    def __init__(
        self, stages: Stages, mesh: Mesh, name: str, parts: Mapping[tuple[int, int], Part], device: torch.device,
        narrow: Narrow,
    ) -> None:  # fmt: skip
        self.stages, self.mesh, self.name, self.device, self.narrow = stages, mesh, name, device, narrow
        self._parts = parts
        self._streams: dict[tuple[int, Any], Stream] = {}
        """By stage that receives, and by the shapes of a micro-batch."""
        self._signatures: Sequence[Any] = ()
        self._posted: dict[Action, tuple[Pending, Tensor]] = {}
        self._sending: list[tuple[Pending, Tensor]] = []
        self._due: Receives = {}
        self._owed: list[Action] = []
        """Of these, what is due and not yet being received."""

    def start(self, micro_batches: Sequence[Any], actions: Sequence[Action]) -> None:
        """Before a step: what will be computed, and of what shapes. Nothing is left of one that failed."""
        self._posted.clear()
        self._signatures = [tuple(t.shape for t in leaves(micro.tensors)) for micro in micro_batches]
        training = any(action.kind != "forward" for action in actions)
        self._due = receives(self.name, self.stages.ranks, len(micro_batches), training)[self.mesh.index("pp")]
        self._owed = []
        self._expect(None)

    def signature(self, part: Part) -> Any:
        """The shapes of a micro-batch."""
        return self._signatures[part.micro]

    def items(self, part: Part) -> int:
        """What blocks before a stage give: 0 for a tensor, else the length of a tuple."""
        return self._streams[part.stage, self.signature(part)].items

    def send_stream(self, part: Part, items: int) -> None:
        """To the next stage."""
        exit = part.exit
        assert exit is not None
        self._receive_owed()
        known = Stream(items, exit.dtype, tuple(exit.shape))
        key = part.stage + 1, self.signature(part)
        if key not in self._streams:
            self._streams[key] = known
            self._send(known.encoded(self.device), part.stage + 1, "forward")
        elif self._streams[key] != known:
            raise WrongUse(
                f"the stream after {self.stages.blocks[part.stage][-1]} has shape {known.shape} where it had "
                f"{self._streams[key].shape} for the same batch: pp needs shapes that follow from the batch's. "
                "Use fsdp instead of pp."
            )
        self._send(self.narrow.encode(exit.detach()), part.stage + 1, "forward")
        self._expect(Action("forward", part.stage, part.micro))

    def send_gradient(self, part: Part, action: Action) -> None:
        """To the stage before."""
        assert part.entry is not None
        back = part.entry.grad
        self._receive_owed()
        back = torch.zeros_like(part.entry) if back is None else back
        self._send(self.narrow.encode(back), part.stage - 1, "backward")
        self._expect(action)

    def received(self, action: Action) -> Tensor:
        """What an action begins with."""
        self._receive_owed(until=action)
        like = self._like(action)
        assert like is not None
        return self.narrow.decode(self._arrived(action), *like)

    def _arrived(self, action: Action) -> Tensor:
        """What was sent for an action, as it was sent."""
        pending, tensor = self._posted.pop(action)
        pending.wait()
        return tensor

    def finish(self) -> None:
        """All that was sent has arrived."""
        for pending, _ in self._sending:
            pending.wait()
        self._sending.clear()

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
                known = Stream.decoded(self._arrived(action))
                self._streams[action.stage, self._signatures[action.micro]] = known
                room = self._room(action)
            assert room is not None
            self._post(action, room)

    def _post(self, action: Action, tensor: Tensor) -> None:
        source = action.stage - 1 if action.kind == "forward" else action.stage + 1
        lane = self._lane(action.stage, action.kind)
        self._posted[action] = lane.receive(tensor, self._rank_of(source)), tensor

    def _room(self, action: Action) -> Tensor | None:
        """Memory for what an action waits for, or None if its shape is not known yet."""
        like = self._like(action)
        return None if like is None else self.narrow.room(*like, self.device)

    def _like(self, action: Action) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of what an action waits for, if they are known."""
        if action.kind == "forward":
            known = self._streams.get((action.stage, self._signatures[action.micro]))
            return None if known is None else (known.shape, known.dtype)
        exit = self._parts[action.stage, action.micro].exit
        assert exit is not None
        return tuple(exit.shape), exit.dtype

    def _rank_of(self, stage: int) -> int:
        return self.mesh.members(("pp",))[stage % self.stages.ranks]

    def _lane(self, stage: int, way: str) -> Communicator:
        """The group for messages to a stage: two ranks, one direction, so that no message waits for another's turn."""
        return self.mesh.lane(way, stage % self.stages.ranks)
