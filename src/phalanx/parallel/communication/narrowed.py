"""Collectives of activations, launched, each sent as narrow as a layout says (`narrow`).

A message is made of every rank's part, this rank's own among them, so that all ranks compute with the same numbers.
What is summed is decoded first: by whoever the sum belongs to, and at least in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.parallel.communication.communicator import Communicator
from phalanx.parallel.communication.exact import fold
from phalanx.parallel.communication.narrow import Narrow

Finish = Callable[[], Tensor]
"""Waits for what was launched, and gives what came of it."""


def start_all_gather(part: Tensor, group: Communicator, narrow: Narrow) -> Finish:
    """Everybody's parts, ``[ranks, *part]``."""
    message = narrow.encode(part)
    every = message.new_empty(group.size, *message.shape)
    pending = group.all_gather(every, message)

    def finish() -> Tensor:
        pending.wait()
        return narrow.decode(every, (group.size, *part.shape), part.dtype)

    return finish


def start_reduce_scatter(parts: Tensor, group: Communicator, narrow: Narrow) -> Finish:
    """The sum over the ranks of this rank's row of ``parts``."""
    if not narrow.narrows(parts.dtype):
        own = parts.new_empty(parts.shape[1:])
        whole = group.reduce_scatter(own, parts)

        def finish_whole() -> Tensor:
            whole.wait()
            return own

        return finish_whole
    messages = narrow.encode_each(parts)
    received = torch.empty_like(messages)
    pending = group.exchange(received, messages)

    def finish() -> Tensor:
        pending.wait()
        wide = torch.promote_types(parts.dtype, torch.float32)
        return fold(narrow.decode(received, parts.shape, wide)).to(parts.dtype, copy=True)

    return finish


def start_all_reduce(x: Tensor, group: Communicator, narrow: Narrow) -> Finish:
    """The sum over the ranks; in few bits, whoever has a part of the rows adds them up, and sends the sum to all."""
    if not narrow.narrows(x.dtype):
        total = x.clone(memory_format=torch.contiguous_format)
        pending = group.all_reduce(total)

        def finish_whole() -> Tensor:
            pending.wait()
            return total

        return finish_whole
    rows = x.reshape(-1, x.shape[-1])
    each = -(-len(rows) // group.size)
    parts = F.pad(rows, [0, 0, 0, each * group.size - len(rows)]).view(group.size, each, x.shape[-1])
    own = start_reduce_scatter(parts.contiguous(), group, narrow)

    def finish() -> Tensor:
        every = start_all_gather(own(), group, narrow)()
        return every.flatten(0, 1)[: len(rows)].reshape(x.shape).clone()

    return finish


def all_to_all(rows: Tensor, group: Communicator, narrow: Narrow) -> Tensor:
    """Row r of every rank that has it for rank r."""
    return narrow.decode(group.all_to_all(narrow.encode_each(rows)), rows.shape, rows.dtype)
