"""What a job would do, in words, with its model described and its data opened: a dry run."""

from __future__ import annotations

from phalanx import inventory
from phalanx.data.loader import seed_globally
from phalanx.data.order import Order
from phalanx.parallel.spread import check_model
from phalanx.parallel.weights.blueprint import Blueprint
from phalanx.precision import DTYPES
from phalanx.settings import plain_settings
from phalanx.train.engine import length
from phalanx.train.job import Job
from phalanx.words import many


def describe(job: Job) -> str:
    """What would run."""
    task, layout = job.task, job.layout
    model = Blueprint(task.model, task.seed).model
    anatomy = task.anatomy(model)
    check_model(layout, model, anatomy)
    seed_globally(task.seed, "data")
    order = Order(length(task.data(), "data", task), task.global_batch, task.seed)
    settings = ", ".join(f"{name}={value}" for name, value in plain_settings(task).items())
    dtypes, micro_batches = DTYPES[task.precision], layout.micro_batches(task.global_batch)
    lines = {
        "task": f"{job.reference} ({type(task).__name__})",
        "set": settings,
        "layout": f"{layout} on {job.cluster.describe()}",
        "model": anatomy.describe(),
        "memory": f"about {inventory.described_memory(task, model, anatomy, layout, dtypes)}",
        "data": f"{many(order.size, 'sample')}, {many(order.steps_per_epoch, 'step')} an epoch",
        "micro": f"{many(micro_batches, 'micro-batch', 'micro-batches')} a step",
        "dtypes": dtypes.table(),
    }
    told = [f"{name:>7}  {text}" for name, text in lines.items()]
    told += ["", *(f"         {line}" for line in inventory.table(inventory.parts(model, anatomy)))]
    device = job.cluster.device
    notes = layout.notes(device, micro_batches) + dtypes.notes(device)
    return "\n".join([*told, *(f"   note  {note}" for note in notes)])
