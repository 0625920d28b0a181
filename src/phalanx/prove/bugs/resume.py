"""Known bugs of checkpoints: what is saved wrongly, read wrongly, or forgotten when a run is resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace as changed
from typing import Any

import torch
from torch import Tensor

from phalanx.checkpoint.manifest import Manifest
from phalanx.checkpoint.read import Wanted
from phalanx.checkpoint.state import Entry, State
from phalanx.parallel.weights.boxes import Box
from phalanx.prove.bugs import seams
from phalanx.prove.bugs.planting import bug, rank
from phalanx.prove.bugs.seams import Replace, replaced
from phalanx.train.checkpointing import Checkpointer
from phalanx.train.engine import Engine
from phalanx.train.saves import Save

Places = dict[str, list[tuple[Box, Tensor]]]


def _reading(replace: Replace, change: Callable[[State, Wanted], Places]) -> None:
    """Have ``change`` spoil where saved tensors go."""
    plain = seams.WANTED.plain
    replace(seams.WANTED, lambda self, manifest: Wanted(change(self, plain(self, manifest))))


def _writing(replace: Replace, change: Callable[[State, Entry], Entry]) -> None:
    """Have ``change`` spoil what is saved."""
    plain = seams.ENTRIES.plain

    def entries(self: State) -> Iterator[Entry]:
        return (change(self, entry) for entry in plain(self))

    replace(seams.ENTRIES, entries)


def _other_part(axis: str) -> Callable[..., list[tuple[Box, Tensor]]]:
    """Places of a weight's parts, each rank's exchanged with the next one's."""

    boxes = seams.BOXES.plain

    def other(weight: Any, cut: Any, index: int, piece: Tensor) -> list[tuple[Box, Tensor]]:
        if cut is not None and cut.axis == axis:
            turned = index ^ 1
            if cut.shape(weight.shape, turned) == cut.shape(weight.shape, index):
                return boxes(weight, cut, turned, piece)
        return boxes(weight, cut, index, piece)

    return other


# The optimizer's state


@bug(43, "fsdp=2", "resume: exp_avg", "")
def moments_not_restored(replace: Replace) -> None:
    """Room is made for the optimizer's moments when a run is resumed, and they are not read into it."""
    _reading(replace, lambda state, found: {n: p for n, p in found.items() if not n.startswith("optimizer/")})


@bug(43, "dp=2", "resume: step of", "")
def counters_not_restored(replace: Replace) -> None:
    """The optimizer's moments are restored, and how many updates they have seen is not."""
    _reading(replace, lambda state, found: {n: p for n, p in found.items() if not n.startswith("counters/")})


@bug(43, "fsdp=2", "resume: exp_avg", "fsdp")
def moments_of_rank_0_alone_restored(replace: Replace) -> None:
    """Only rank 0 has its moments back."""

    def change(state: State, found: Wanted) -> Places:
        return {n: p for n, p in found.items() if rank() == 0 or not n.startswith("optimizer/")}

    _reading(replace, change)


@bug(43, "fsdp=3", "resume: ", "fsdp")
def rows_read_from_a_padded_place(replace: Replace) -> None:
    """Where rows were padded to divide by ranks, a rank's rows are looked for a row too early."""

    def change(state: State, found: Wanted) -> Places:
        def shifted(box: Box) -> Box:
            return Box((box.offsets[0] - 1, *box.offsets[1:]), box.sizes) if box.offsets and box.offsets[0] else box

        return {n: [(shifted(box), view) for box, view in p] for n, p in found.items()}

    _reading(replace, change)


# Parts and places


@bug(44, "tp=2", "resume: blocks|of blocks", "tp")
def tp_parts_saved_in_each_others_place(replace: Replace) -> None:
    """Each rank of tp saves its part of a weight where the other's belongs."""
    plain = seams.ENTRIES.plain

    def entries(self: State) -> Iterator[Entry]:
        with replaced() as swap:
            swap(seams.BOXES, _other_part("tp"))
            found = list(plain(self))
        yield from found

    replace(seams.ENTRIES, entries)


@bug(44, "tp=2", "resume elsewhere: blocks|of blocks", "tp")
def tp_parts_in_an_order_of_their_own(replace: Replace) -> None:
    """Parts are saved and read in the same wrong order: it shows when another layout reads them."""
    replace(seams.BOXES, _other_part("tp"))


@bug(43, "fsdp=2,ep=2", "resume: ", "ep", experts=8)
def experts_read_into_each_others_place(replace: Replace) -> None:
    """Each rank of ep reads the experts that the other one has."""
    plain = seams.WANTED.plain

    def wanted(self: State, manifest: Manifest) -> Wanted:
        with replaced() as swap:
            swap(seams.BOXES, _other_part("ep"))
            return plain(self, manifest)

    replace(seams.WANTED, wanted)


# What moment it is that is saved


@bug(49, "dp=2", "resume: stem", "", task="shapes")
def buffers_saved_from_before_the_update(replace: Replace) -> None:
    """Running statistics are saved as they were before the last step."""
    plain, before = seams.STEP.plain, dict[str, Tensor]()

    def step(self: Engine, batch: Any) -> Any:
        before.update((f"model/{name}", tensor.clone()) for name, tensor in self.spread.whole.replicated())
        return plain(self, batch)

    replace(seams.STEP, step)
    _writing(replace, lambda state, entry: changed(entry, value=before.get(entry.name, entry.value)))


@bug(49, "dp=2", "resume: ", "")
def copy_not_awaited(replace: Replace) -> None:
    """State is copied while the next step runs, and its update does not wait for the copy."""
    plain = seams.COPY.plain

    def copy(self: Checkpointer, save: Save) -> None:
        deadline = time.monotonic() + 5
        while not save.to_file and self.engine.step_number == save.step and time.monotonic() < deadline:
            time.sleep(0.001)
        plain(self, save)

    replace(seams.COPY, copy)
    replace(seams.WAIT_FOR_COPY, lambda self, engine: None)


@bug(0, "fsdp=2", "resume: ", "")
def saved_in_bfloat16(replace: Replace) -> None:
    """Checkpoints are made small by a precision that training does not have."""

    def change(state: State, entry: Entry) -> Entry:
        floats = entry.value.is_floating_point()
        return changed(entry, value=entry.value.to(torch.bfloat16).to(entry.value.dtype)) if floats else entry

    _writing(replace, change)


# Where the run stands


@bug(38, "dp=2", "ledger: steps", "")
def data_a_step_ahead_after_resuming(replace: Replace) -> None:
    """The next batch is counted as done when a run is resumed, and is never trained on."""
    plain = seams.BATCHES.plain
    replace(seams.BATCHES, lambda self, start, stop: plain(self, start + (start > 0), stop))


@bug(38, "dp=2", "ledger: hash", "")
def resumed_with_the_next_epochs_order(replace: Replace) -> None:
    """A resumed run counts the epoch that it was in as over, and goes on in the order of the next."""
    plain, epoch, resumed = seams.RESUME.plain, seams.EPOCH.plain, [0]

    def resume(self: Engine, facts: Any) -> None:
        plain(self, facts)
        resumed[0] = 1

    replace(seams.RESUME, resume)
    replace(seams.EPOCH, lambda self, step: epoch(self, step) + resumed[0])


@bug(39, "dp=2", "resume: step number", "")
def step_number_not_restored(replace: Replace) -> None:
    """A resumed run counts its steps from the beginning of the epoch that it resumes in."""
    plain = seams.RESUME.plain
    replace(seams.RESUME, lambda self, facts: plain(self, {**facts, "step": 0}))


@bug(0, "dp=2", "resume: loss scale", "", dtype="fp16")
def loss_scale_forgotten(replace: Replace) -> None:
    """A resumed run in float16 begins with a loss scale of its own."""
    replace(seams.LOSS_SCALE, lambda self, state: None)


@bug(23, "fsdp=2,zero=1", "in use", "fsdp")
def weights_in_use_not_refreshed(replace: Replace) -> None:
    """Each rank's rows are restored, and the whole weights that the model computes with stay as they were."""
    plain = seams.RESUME.plain

    def resume(self: Engine, facts: Any) -> None:
        with replaced() as without:
            without(seams.UPDATED, lambda self, copied=frozenset(): None)
            plain(self, facts)

    replace(seams.RESUME, resume)
