"""What a task wants to know of every sample before the first step: computed by the ranks together, and kept.

The engine holds the weights that training begins with when it is made, also where a run goes on. What they give of each
sample, such as the log-probabilities of a reference model, joins the samples. In a run's folder it lies in
``beforehand.safetensors``: ranks that start again read it and compute nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from phalanx.data.fingerprint import digest, near
from phalanx.data.joined import JoinedSamples, apart
from phalanx.data.loader import Loader
from phalanx.data.order import Order
from phalanx.data.seeding import sample_at
from phalanx.errors import CannotHere, WrongUse
from phalanx.events import say
from phalanx.files import exists, write_whole
from phalanx.train.evaluate import computed

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

FILE = "beforehand.safetensors"
TRAINING, HELD_OUT = "data", "held_out"
AT_ONCE = 1 << 20
"""Numbers that are told to all ranks in one message."""
Columns = dict[str, Tensor]


def join_beforehand(engine: Engine) -> None:
    """Have samples know what the task wants to know of them, if anything. All ranks must call it."""
    measure = engine.task.beforehand()
    if measure is None:
        return
    loaders = {TRAINING: engine.loader} | ({HELD_OUT: engine.held_out} if engine.held_out is not None else {})
    for loader in loaders.values():
        loader.reader.data = apart(loader.reader.data)
    path = None if engine.run is None else engine.run.path / FILE
    means, begun = _means(engine, loaders)
    found = _kept(engine, path, means, begun) or {}
    wanted = {part: loader for part, loader in loaders.items() if engine.evaluates in ("", part)}
    for part, loader in wanted.items():
        if not any(name.startswith(f"{part}/") for name in found):
            columns = _computed(engine, loader, measure)
            found |= {f"{part}/{name}": column for name, column in columns.items()}
    if path is not None and engine.is_main and not exists(path) and not engine.evaluates:
        write_whole(path, save(found, {"of": means, "begun": begun}))
    for part, loader in wanted.items():
        own = {name.removeprefix(f"{part}/"): tensor for name, tensor in found.items() if name.startswith(f"{part}/")}
        loader.reader.data = JoinedSamples(loader.reader.data, own)


def _computed(engine: Engine, loader: Loader, measure: Callable[..., Mapping[str, Any]]) -> Columns:
    """Rows of all samples in the order of the data, on every rank."""
    size, task = loader.order.size, engine.task
    order = Order(size, task.global_batch, task.seed, shuffle=False)
    in_order = engine.loader_of(loader.reader.data, order)
    engine.spread.refresh()
    _, collected = computed(engine, in_order, order.steps_per_epoch, measure, partial(_beat, engine))
    gathered, _ = collected.gathered(engine, size)
    own = [] if gathered is None else [json.dumps([n, list(t.shape), str(t.dtype)[6:]]) for n, t in gathered.items()]
    found: Columns = {}
    for word in engine.mesh.world.broadcast_words(own, 0):
        name, shape, dtype = json.loads(word)
        whole = torch.zeros(shape, dtype=getattr(torch, dtype)) if gathered is None else gathered[name]
        found[name] = _told(engine, whole)
    if not found:
        raise WrongUse(
            f"{type(task).__name__}.beforehand gives a function that returns nothing. Return tensors by name, each "
            "with a row a sample, or let beforehand return None."
        )
    return found


def _beat(engine: Engine) -> None:
    """A batch was computed: it may take long, and whoever watches sees that it goes on."""
    if engine.mesh.world.alone:
        engine.traffic.alive()
    else:
        engine.mesh.world.all_reduce(torch.zeros(1, device=engine.device)).wait()


def _told(engine: Engine, whole: Tensor) -> Tensor:
    """Rank 0's tensor on all ranks: the others add zeros to it."""
    for part in whole.view(-1).split(AT_ONCE):
        sent = part.to(engine.device)
        engine.mesh.world.all_reduce(sent).wait()
        part.copy_(sent)
    return whole


def _means(engine: Engine, loaders: Mapping[str, Loader]) -> tuple[str, str]:
    """What the numbers follow from: some of the samples, and where weights begin; and the latter alone."""
    own: list[str] = []
    if engine.is_main:
        begun = [str(engine.task.pretrained()), engine.task.seed, engine.task.precision]
        samples = [engine.loader.looked_at(partial(_looks, engine, loader)) for loader in loaders.values()]
        own = [hashlib.sha256(json.dumps(each).encode()).hexdigest() for each in ([begun, samples], begun[:2])]
    means, begins = engine.mesh.world.broadcast_words(own, 0)
    return means, begins


def _looks(engine: Engine, loader: Loader) -> list[Any]:
    """Of a data set, how many samples it has, and hashes of three."""
    data, size = loader.reader.data, loader.order.size
    return [size, *(digest(sample_at(data, place, engine.task.seed)) for place in near(data, (0, size // 2, size - 1)))]


def _kept(engine: Engine, path: Path | None, means: str, begun: str) -> Columns | None:
    """What an earlier start left in the run's folder, read by rank 0; None where there is none."""
    words: list[str] = []
    found: Columns = {}
    if path is not None and engine.is_main:
        words, found = _read(engine, path, means, begun)
    answer = engine.mesh.world.broadcast_words(words, 0)
    if answer[:1] == ["refused"]:
        raise CannotHere(answer[1])
    if not answer:
        return None
    for word in answer:
        name, shape, dtype = json.loads(word)
        found[name] = _told(engine, found.get(name, torch.zeros(shape, dtype=getattr(torch, dtype))))
    quiet = engine.evaluates or (engine.run is not None and not exists(engine.run.settings_path))  # or of no run
    if engine.is_main and not quiet:  # whose output may be read by a program
        say(f"   note  {path} has what is known of the samples beforehand: nothing is computed again")
    return found


def _read(engine: Engine, path: Path, means: str, begun: str) -> tuple[list[str], Columns]:
    if not exists(path):
        return _anew(engine, f"{path} is gone. Put it back, or start a new run."), {}
    try:
        with safe_open(path, "pt") as file:
            said = file.metadata() or {}
            if said.get("of") != means:
                other = f"{path} is of other settings or samples than the run has now. Make them what they were, or "
                if engine.evaluates and said.get("begun") == begun:
                    return _anew(engine, f"{other}put back where it began."), {}
                return ["refused", f"{other}start a new run."], {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        return ["refused", f"{path} cannot be read ({error}). Remove it, and it is computed again."], {}
    return [json.dumps([name, list(t.shape), str(t.dtype)[6:]]) for name, t in found.items()], found


def _anew(engine: Engine, refusal: str) -> list[str]:
    """Nothing is known, and all is computed, if the engine has the weights that the run began with."""
    begun = engine.run is not None and exists(engine.run.settings_path) and engine.run.settings()["run"]
    if begun and begun.get("init_from") and engine.init_from is None:
        why = f"it follows from the weights that {begun['init_from']} had when the run began, which are not here now"
        return ["refused", f"{refusal} It cannot be computed again: {why}."]
    return []
