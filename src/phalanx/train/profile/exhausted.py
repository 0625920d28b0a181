"""Out of memory: what held it, by part, in a file of the run's folder that the failure names."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from phalanx.files import write_whole
from phalanx.folder_files import make_folder
from phalanx.parallel.torch_private import FakeTensor
from phalanx.run import Run
from phalanx.torch_errors import About, is_about
from phalanx.train.held import counted, held_now
from phalanx.train.memory import fullest
from phalanx.words import columns, in_bytes

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

SHOWN = 20
"""Tensors."""
TITLES = {
    "weights": "weights", "gradients": "gradients", "optimizer": "the optimizer's moments",
    "callbacks": "what callbacks keep", "sites": "what sites have agreed on, and have on its way",
}  # fmt: skip
ADVICE = (
    "What helps: fewer samples at once (micro_batch in --layout), recompute=full for activations, fsdp with zero=3 or "
    "offload for weights and optimizer, a narrower precision, less of anything that the task itself keeps."
)


def is_exhausted(error: BaseException) -> bool:
    """Whether there was no memory left, of a GPU or of the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, (RuntimeError, OSError)) and is_about(error, About.MEMORY)


@contextmanager
def memory_told(run: Run, rank: int, engine: Engine | None = None) -> Iterator[None]:
    """What ends in want of memory meanwhile leaves a file that says what held it, and names it."""
    try:
        yield
    except Exception as error:
        if is_exhausted(error):
            path = run.path / "profile" / f"memory-rank-{rank}.txt"
            try:
                make_folder(run.path, path.parent)
                write_whole(path, "\n".join(_words(error, rank, engine)) + "\n", within=run.path)
                error.add_note(f"what held the memory of rank {rank} is in {path}")
            except Exception as another:  # there may be none left for that either; the first error is more important
                why = f"{type(another).__name__}: {another}"
                error.add_note(f"what held the memory of rank {rank} could not be told: {why}")
        raise


def _words(error: Exception, rank: int, engine: Engine | None) -> Iterator[str]:
    step = "" if engine is None else f" in step {engine.step_number + 1}"
    yield f"rank {rank} on {socket.gethostname()} had no memory left{step}"
    yield f"{type(error).__name__}: {str(error).strip()}"
    device = torch.device("cpu") if engine is None else engine.device
    if engine is None:
        on = ["while the model and its data were made"]
    else:
        on = [f"layout {engine.layout}, {engine.device}"]
        on.append(f"by arithmetic, the fullest rank: {fullest(engine.spread.placement, engine.kept, engine.dtypes)}")
    yield from on
    yield from ["", *columns([["held now, by part", "bytes"], *_parts(engine, device)], right=(1,))]
    yield from ["", "the largest tensors that Python knows of: none of those that only autograd's graph holds"]
    yield from columns([["bytes", "tensor", "weight"], *_largest(engine)], right=(0,))
    if device.type == "cuda":
        yield from ["", torch.cuda.memory_summary(device)]
    yield from ["", ADVICE]


def _parts(engine: Engine | None, device: torch.device) -> Iterator[list[str]]:
    """Each memory counted once, by the first part that it belongs to."""
    parts = {} if engine is None else counted(engine, device)
    for name, own in parts.items():
        yield [TITLES[name], in_bytes(own)]
    whole, rest = held_now(device), "activations, and buffers of what is under way"
    if device.type != "cuda":
        rest = "activations, buffers of what is under way, data, Python and its libraries"
    yield [rest, in_bytes(max(0, whole - sum(parts.values())))]
    yield ["in all", in_bytes(whole)]


def _largest(engine: Engine | None) -> list[list[str]]:
    names: dict[int, str] = {}
    for name, weight in engine.spread.weights.items() if engine is not None else ():
        names |= {t.untyped_storage().data_ptr(): name for t in (weight.full, weight.shard) if t.untyped_storage()}
    found: dict[int, tuple[int, Tensor]] = {}
    for each in gc.get_objects():
        with suppress(Exception):  # what is no tensor may raise whatever it likes when it is asked
            if issubclass(type(each), Tensor) and not issubclass(type(each), FakeTensor) and not each.is_meta:
                storage = each.untyped_storage()
                found.setdefault(storage.data_ptr(), (storage.nbytes(), each.detach()))
    ordered = sorted(found.items(), key=lambda pair: -pair[1][0])[:SHOWN]
    return [
        [in_bytes(size), f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)} on {t.device}", names.get(at, "")]
        for at, (size, t) in ordered
        if size
    ]
