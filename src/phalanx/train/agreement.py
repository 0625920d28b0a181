"""Before the first step: do all ranks mean the same job? What differs would train wrongly, or hang, and say nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from phalanx import counter
from phalanx.data.fingerprint import digest, near
from phalanx.errors import WrongUse
from phalanx.kernels import flash_attention, nf4  # noqa: F401  # ranks agree on every kernel there is
from phalanx.kernels.choice import KERNELS, Kernel
from phalanx.parallel.communication.communicator import Communicator
from phalanx.settings import plain_settings

if TYPE_CHECKING:
    from phalanx.train.engine import Engine


class Disagreement(WrongUse):
    """Ranks do not mean the same job."""


ADVICE = {
    "settings": "Start every rank with the same task and settings.",
    "layout": "Start every rank with the same layout.",
    "kernels": "Exact sums need the same torch, processor and OMP_NUM_THREADS everywhere; leave exact out otherwise.",
    "callbacks": "Task.callbacks must give every rank the same ones, in the same order.",
    "data": "Task.data must give every rank the same samples under the same indices: seed what is random in it.",
    "model": "Task.model must build the same weights on every rank: nothing in it may depend on the rank.",
}


def agree_on_kernels(engine: Engine) -> None:
    """One that does not work on a rank is used on none: they would compute in other chunks, and to other bits."""
    settle(KERNELS, engine.device, engine.mesh.world)
    flash_attention.stand_in(engine.device)


def agreed_hosts(engine: Engine) -> list[int]:
    """On which host each rank is; none where ranks were not told alike. All ranks must call it."""
    hosts = engine.environment.hosts
    if engine.environment.world == 1 or engine.device.type == "cuda":
        return hosts
    own = torch.tensor([counter.key(str(hosts))])
    bounds = torch.cat([own, ~own])
    Communicator(dist.group.WORLD, engine.traffic).all_reduce_max(bounds)
    return hosts if torch.equal(bounds[:1], ~bounds[1:]) else []


def settle(kernels: Sequence[Kernel], device: torch.device, world: Communicator) -> None:
    """Have these used on all ranks, or on none. All ranks must call it."""
    if device.type != "cuda" or world.alone:
        return
    kernels = sorted(kernels, key=lambda kernel: kernel.name)
    fails = torch.tensor([float(not kernel.works(device)) for kernel in kernels], device=device)
    world.all_reduce_max(fails)
    for kernel, anywhere in zip(kernels, fails.tolist(), strict=True):
        kernel.settle(device, not anywhere)


def check_agreement(engine: Engine, *names: str) -> None:
    """Compare fingerprints of these facts over all ranks; name what differs and where."""
    if engine.environment.world == 1:
        return
    facts = {name: FACTS[name](engine) for name in names}
    own = torch.tensor([counter.key(fact) for fact in facts.values()], device=engine.device)
    world = Communicator(dist.group.WORLD, engine.traffic)
    bounds = torch.cat([own, ~own])  # the largest of these, and the smallest: the same where all are
    world.all_reduce_max(bounds)
    if torch.equal(bounds[: len(own)], ~bounds[len(own) :]):
        return
    every = own.new_empty(engine.environment.world, len(own))
    world.all_gather(every, own).wait()
    for name, first, *others in zip(names, *every.tolist(), strict=True):
        different = [rank for rank, value in enumerate(others, 1) if value != first]
        if different:
            ranks = ", ".join(map(str, different[:8]))
            raise Disagreement(
                f"the {name} of rank {ranks} is not that of rank 0 "
                f"(rank {engine.environment.rank} has: {facts[name][:200]}). {ADVICE[name]}"
            )


def _settings(engine: Engine) -> str:
    fields = ", ".join(f"{name}={value}" for name, value in plain_settings(engine.task).items())
    return f"{type(engine.task).__name__}({fields})"


def _layout(engine: Engine) -> str:
    return str(engine.layout)


def _callbacks(engine: Engine) -> str:
    return ", ".join(engine.callbacks.named) or "none"


def _kernels(engine: Engine) -> str:
    """What the bits of a result hang on, where they must be the same."""
    if not engine.layout.exact:
        return "any"
    processor = torch.backends.cpu.get_cpu_capability()
    device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
    return f"torch {torch.__version__}, {device}, {processor}, {torch.get_num_threads()} threads"


def _data(engine: Engine) -> str:
    size = engine.order.size
    some = sorted(near(engine.loader.reader.data, {0, size // 3, 2 * size // 3, size - 1}))
    read = engine.loader.reader.read
    found = engine.loader.looked_at(lambda: digest([read(index) for index in some]))
    return f"{size} samples, of which {some} are {found}"


def _model(engine: Engine) -> str:
    return ", ".join(f"{name} {tuple(shape)}" for name, shape in engine.spread.holding.shapes.items())


FACTS: dict[str, Callable[[Engine], str]] = {
    "settings": _settings,
    "layout": _layout,
    "kernels": _kernels,
    "callbacks": _callbacks,
    "data": _data,
    "model": _model,
}
