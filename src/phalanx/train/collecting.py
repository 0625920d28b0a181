"""What `Task.evaluate` gives of each held-out sample, brought to rank 0 in the order of the data.

Every rank keeps its own rows in memory of the host, and passes them on in messages of a bounded size: only rank 0 ever
has all of them, and it asks `Task.summarise` for what all ranks then know.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phalanx import user_code
from phalanx.errors import WrongUse
from phalanx.task import Task

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

MESSAGE_BYTES = 1 << 24
TEXT = "text"
RAGGED = "rows of their own, "
Gathered = dict[str, Any]
"""By name, a tensor with a row a sample, or a list with a string or a tensor a sample."""


class CannotSummarise(WrongUse):
    """The task's own `summarise` has failed."""


@dataclass
class Column:
    """One rank's rows of what a task gives by one name."""

    places: list[Tensor] = field(default_factory=list)
    """Where in the data the samples of each part are."""
    parts: list[Any] = field(default_factory=list)
    """Tensors, or lists of strings or of tensors."""

    @property
    def kinds(self) -> list[str]:
        """What the rows are: one kind, if they can be put together."""
        return sorted({kind for part in self.parts for kind in _kinds(part)})

    def messages(self) -> Iterator[Tensor]:
        """The rows as bytes: how many, their places, and what they are."""
        for places, part in self._joined():
            for rows in _few(part):
                number = torch.tensor([rows.stop - rows.start])
                yield torch.cat([_bytes(number), _bytes(places[rows]), _encoded(part[rows])])

    def _joined(self) -> Iterator[tuple[Tensor, Any]]:
        """Parts put together up to a message's size: there is one of each micro-batch."""
        first, filled = 0, 0
        for stop, part in enumerate(self.parts, 1):
            filled += sum(map(_size, part)) if isinstance(part, list) else part.nbytes + 8 * len(part)
            if filled >= MESSAGE_BYTES or stop == len(self.parts):
                yield torch.cat(self.places[first:stop]), whole_of(self.parts[first:stop])
                first, filled = stop, 0


def whole_of(parts: list[Any]) -> Any:
    """Parts of a column as one: a tensor, or a list."""
    return [*chain(*parts)] if isinstance(parts[0], list) else torch.cat(parts)


def _kinds(part: Any) -> set[str]:
    if isinstance(part, Tensor):
        return {_kind(part)}
    return {TEXT if isinstance(item, str) else f"{RAGGED}{_kind(item)}" for item in part}


def _kind(part: Tensor) -> str:
    """Of rows that are those of a tensor."""
    return f"{str(part.dtype).removeprefix('torch.')} of shape {tuple(part.shape[1:])}"


def _size(item: str | Tensor) -> int:
    """Bytes of what a list has of one sample, about."""
    return len(item.encode()) + 8 if isinstance(item, str) else item.nbytes + 16


def _few(part: Any) -> Iterator[slice]:
    """Rows that fit into a message."""
    sizes = [*map(_size, part)] if isinstance(part, list) else None
    each = 0 if sizes else part[0].numel() * part.element_size() + 8
    start, filled = 0, 0
    for row in range(len(part)):
        filled += sizes[row] if sizes else each
        if filled > MESSAGE_BYTES and row > start:
            yield slice(start, row)
            start, filled = row, sizes[row] if sizes else each
    yield slice(start, len(part))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _encoded(rows: Any) -> Tensor:
    if isinstance(rows, Tensor):
        return _bytes(rows)
    if isinstance(rows[0], Tensor):
        return torch.cat([_bytes(torch.tensor([len(row) for row in rows])), *map(_bytes, rows)])
    return torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8)


class Collected:
    """What one rank has of all columns."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.columns: dict[str, Column] = {}

    def add(self, name: str, value: Any, places: np.ndarray, real: bool) -> None:
        """A micro-batch's rows; those of one that only stands in are looked at and let go."""
        where = f"{type(self.task).__name__}.evaluate gave for {name!r}"
        if isinstance(value, list) and not any(all(map(right, value)) for right in (_is_text, _has_rows)):
            kinds = ", ".join(sorted({_named(item) for item in value}))
            raise WrongUse(
                f"{where} a list of {kinds}. Return a tensor with a row a sample, or a list with a string or a tensor "
                "of at least one dim for each sample."
            )
        shape = tuple(value.shape) if isinstance(value, Tensor) else (len(value),)
        if shape[:1] != (len(places),):
            what = f"a tensor of shape {shape}" if isinstance(value, Tensor) else f"a list of {len(value)}"
            raise WrongUse(
                f"{where} {what} for {len(places)} samples. Return one row a sample, in the order of the batch, to "
                "have it gathered for summarise(); for a sum over the batch return phalanx.Loss(total, count)."
            )
        if real:
            column = self.columns.setdefault(name, Column())
            column.places.append(torch.from_numpy(places).clone())
            column.parts.append(_kept(value) if isinstance(value, Tensor) else [*map(_kept, value)])

    def gathered(self, engine: Engine, samples: int, may_lack: bool = False) -> tuple[Gathered | None, bool]:
        """On rank 0 all rows of all ranks, a column after the other; and whether there are any. All must call it.

        ``may_lack``: samples that could not be read are not among them.
        """
        if not engine.mesh.counts_samples:
            self.columns = {}
        own = [json.dumps([name, column.kinds]) for name, column in sorted(self.columns.items())]
        every = [dict(json.loads(word) for word in words) for words in engine.mesh.world.all_gather_words(own)]
        names = sorted({name for columns in every for name in columns})
        for name in names:
            check_alike(self.task, name, {kind for columns in every for kind in columns.get(name, ())})
        found: Gathered = {}
        amiss: list[str] = []
        for name in names:
            holders = [rank for rank, columns in enumerate(every) if name in columns]
            kind = every[holders[0]][name][0]
            own_rows = self.columns.pop(name, Column())
            found[name], times = _assembled(engine, own_rows, holders, kind, samples)
            if may_lack and bool((times == 0).any()):
                here = times.nonzero().flatten()
                found[name], times = _rows_of(found[name], here), times[here]
            wrong = (times != 1).nonzero().flatten().tolist()[:1]
            amiss += [f"{name!r} of held-out sample {place} was gathered {int(times[place])} times" for place in wrong]
        for told in engine.mesh.world.broadcast_words(amiss, 0):
            raise WrongUse(f"{told}, not once. Have {type(self.task).__name__}.evaluate give it for every batch.")
        return (found if engine.environment.rank == 0 else None), bool(names)


def _is_text(item: Any) -> bool:
    return isinstance(item, str)


def _has_rows(item: Any) -> bool:
    return isinstance(item, Tensor) and item.ndim > 0


def _named(item: Any) -> str:
    return f"tensor of shape {tuple(item.shape)}" if isinstance(item, Tensor) else type(item).__name__


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


def _rows_of(column: Any, places: Tensor) -> Any:
    return [column[place] for place in places.tolist()] if isinstance(column, list) else column[places]


def check_alike(task: Task, name: str, kinds: set[str]) -> None:
    """Refuse rows that cannot be put together."""
    if len(kinds) > 1:
        raise WrongUse(
            f"{type(task).__name__}.evaluate gave for {name!r} rows that do not stack: {' and '.join(sorted(kinds))}. "
            "Make them alike for all samples, or give a list with a tensor for each sample, alike in all dims but the "
            "first."
        )


def _assembled(engine: Engine, own: Column, holders: list[int], kind: str, samples: int) -> tuple[Any, Tensor]:
    """On rank 0, a column's rows in the order of the data, and how often each came; elsewhere nothing."""
    samples *= engine.environment.rank == 0
    times = torch.zeros(samples, dtype=torch.int64)
    dtype, _, shape = kind.removeprefix(RAGGED).partition(" of shape ")
    sizes = [int(size) for size in shape.strip("()").split(",") if size.strip()]
    rows_like = torch.empty(0, *sizes, dtype=torch.uint8 if kind == TEXT else getattr(torch, dtype))
    listed = kind == TEXT or kind.startswith(RAGGED)
    whole: Any = [""] * samples if listed else rows_like.new_empty(samples, *sizes)
    for holder in holders:
        for message in _messages(engine, own, holder):
            rows = int(message[:8].clone().view(torch.int64))
            places = message[8 : 8 + 8 * rows].clone().view(torch.int64)
            body = message[8 + 8 * rows :].clone()
            times.index_add_(0, places, torch.ones_like(places))
            if kind == TEXT:
                for place, text in zip(places.tolist(), json.loads(body.numpy().tobytes()), strict=True):
                    whole[place] = text
            elif listed:
                lengths = body[: 8 * rows].view(torch.int64).tolist()
                every = body[8 * rows :].clone().view(rows_like.dtype).view(sum(lengths), *sizes)
                for place, row in zip(places.tolist(), every.split(lengths), strict=True):
                    whole[place] = row.clone()
            else:
                whole[places] = body.view(whole.dtype).view(rows, *sizes)
    return whole, times


def _messages(engine: Engine, own: Column, holder: int) -> Iterator[Tensor]:
    """On rank 0, a rank's messages, one at a time; elsewhere nothing."""
    rank, world, device = engine.environment.rank, engine.mesh.world, engine.device
    if rank == holder == 0:
        yield from own.messages()
    elif rank == holder:
        for message in own.messages():
            world.send(torch.tensor([len(message)], device=device), 0).wait()
            world.send(message.to(device), 0).wait()
        world.send(torch.zeros(1, dtype=torch.int64, device=device), 0).wait()
    elif rank == 0:
        while True:
            size = torch.zeros(1, dtype=torch.int64, device=device)
            world.receive(size, holder).wait()
            if not int(size):
                return
            message = torch.empty(int(size), dtype=torch.uint8, device=device)
            world.receive(message, holder).wait()
            yield message.cpu()


def summarised(engine: Engine, gathered: Gathered | None) -> dict[str, float]:
    """What the task makes of all rows: asked on rank 0, known to all. All must call it."""
    task, words, cause = engine.task, [], None
    if gathered is not None:
        try:
            words = [json.dumps([name, repr(value)]) for name, value in numbers(task, gathered).items()]
        except Exception as error:
            refused = isinstance(error, WrongUse)
            words, cause = [json.dumps([refused, type(error).__name__, f"{error}{_line(error)}"])], error
    found = [json.loads(word) for word in engine.mesh.world.broadcast_words(words, 0)]
    for refused, kind, text in (each for each in found if len(each) == 3):
        if refused:
            raise WrongUse(text) from cause
        raise CannotSummarise(
            f"{type(task).__name__}.summarise failed: {kind}: {text}. Mend it: it gets what evaluate() gave, by name, "
            "with a row for each held-out sample."
        ) from cause
    return {name: float(value) for name, value in found}


def numbers(task: Task, gathered: Gathered) -> dict[str, float]:
    """What a task's `summarise` gives, checked."""
    found, name = task.summarise(gathered), f"{type(task).__name__}.summarise"
    how = 'Return a dict of numbers by name, e.g. {"auc": 0.9}.'
    if not isinstance(found, dict):
        raise WrongUse(f"{name} gave a {type(found).__name__}. {how}")
    checked: dict[str, float] = {}
    for key, value in found.items():
        number = _number(value)
        if not isinstance(key, str) or number is None:
            shape = f" of shape {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else ""
            raise WrongUse(f"{name} gave for {key!r} a {type(value).__name__}{shape}, which is no number. {how}")
        checked[key] = number
    return checked


def _number(value: Any) -> float | None:
    single = isinstance(value, (Tensor, np.ndarray)) and math.prod(value.shape) == 1
    value = value.item() if single else value
    return float(value) if isinstance(value, Real) else None


def _line(error: Exception) -> str:
    frame = None if isinstance(error, WrongUse) else user_code.innermost(error.__traceback__)
    return f" ({user_code.place(frame.filename, frame.lineno)})" if frame else ""
