"""What a job would do, in words, with its model described and its data opened: a dry run."""

from __future__ import annotations

from phalanx import inventory
from phalanx.callbacks import KeepBest
from phalanx.data.adopted import training_samples
from phalanx.data.planned import training_order
from phalanx.layout_notes import layout_notes
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.parallel.weights.placement import Placement
from phalanx.parameters import building
from phalanx.precision import DTYPES
from phalanx.settings import plain_settings
from phalanx.train.calling import made_callbacks
from phalanx.train.job import Job
from phalanx.train.listing import listed
from phalanx.train.memory import Kept, fullest
from phalanx.train.overview import kept_best, split_notes
from phalanx.train.sites import check_scales
from phalanx.words import many


def describe(job: Job, every_weight: bool = False) -> str:
    """What would run; weights of blocks that are alike in one line, or each in its own."""
    task, layout = job.task, job.layout
    check_scales(task, layout)
    model = Blueprint(building(task), task.seed).model
    anatomy = task.anatomy(model)
    placement = Placement.of(model, anatomy, layout, DTYPES[task.precision])
    data = training_samples(task)
    order = training_order(task, data)
    settings = ", ".join(f"{name}={value}" for name, value in plain_settings(task).items())
    callbacks, (facts, said) = made_callbacks(task), task.overview()
    dtypes, micro_batches = DTYPES[task.precision], layout.micro_batches(task.global_batch)
    kept = Kept.of(task, placement, dtypes, callbacks, local=layout.local)
    lines = {
        "task": f"{job.reference} ({type(task).__name__})",
        "set": settings,
        "layout": f"{layout} on {job.cluster.describe()}",
        "model": anatomy.describe(),
        "memory": f"about {fullest(placement, kept, dtypes)}",
        "data": f"{order.describe()}; {many(order.steps_per_epoch, 'step')} an epoch",
        **facts,
        "micro": f"{many(micro_batches, 'micro-batch', 'micro-batches')} a step",
        "dtypes": dtypes.table(),
    }
    lines |= kept_best(next((each for each in callbacks if isinstance(each, KeepBest)), None))
    if callbacks:
        lines["calls"] = ", ".join(type(each).__name__ for each in callbacks)
    told = [f"{name:>7}  {text}" for name, text in lines.items()]
    for table in (inventory.table(inventory.parts(model, anatomy)), listed(placement, every_weight)):
        told += ["", *(f"         {line}" for line in table)]
    device = job.cluster.device
    notes = layout_notes(layout, device, micro_batches, dtypes.compute.itemsize)
    notes += [*split_notes(anatomy), *said, *dtypes.notes(device)]
    return "\n".join([*told, *(f"   note  {note}" for note in notes)])
