"""A checkpoint's weights put into an engine, with what callbacks keep beside them and nothing of the optimizer's."""

from __future__ import annotations

from dataclasses import replace

from phalanx import streams
from phalanx.checkpoint.fitting import check_fits
from phalanx.checkpoint.manager import Checkpoint, CheckpointManager
from phalanx.checkpoint.manifest import Damaged, Manifest
from phalanx.checkpoint.state import State
from phalanx.checkpoint.verify import check_committed
from phalanx.errors import CannotHere
from phalanx.events import say
from phalanx.train.engine import Engine

KEPT = ("model/", "callbacks/")
"""What of a checkpoint that is."""


def load_weights(engine: Engine, manager: CheckpointManager, step: int) -> Manifest:
    """Load the weights of a checkpoint, under any layout; the optimizer starts anew. All ranks must call it."""
    damage = ""
    try:
        checkpoint = manager.open(step)
        checkpoint.manifest.check_facts(checkpoint.where)
        if engine.is_main:
            _check_own(engine, checkpoint)
        manifest = checkpoint.manifest
        tensors = {name: held for name, held in manifest.tensors.items() if name.startswith(KEPT)}
        manifest = replace(manifest, tensors=tensors, numbers={})
        beside, left_out = engine.callbacks.tensors(), engine.frozen.names
        state = State(engine.spread, engine.optimizer, engine.environment.hosts, beside, left_out)
        check_fits(state, manifest)
        checkpoint.read(state.wanted(manifest))
    except (Damaged, OSError) as error:
        damage = str(error)
    damages = [words[0] for words in engine.mesh.world.all_gather_words([damage]) if words[0]]
    if damages:
        raise CannotHere(f"the checkpoint of step {step} cannot be read: {damages[0]}. Choose another.")
    engine.frozen.take_up(state, manifest)
    engine.spread.restore_scales(manifest.facts.get("fp8"))
    engine.spread.reduction.settle()
    engine.spread.updated()
    return manifest


def _check_own(engine: Engine, checkpoint: Checkpoint) -> None:
    """Refuse what another run has left there."""
    if engine.run is not None:
        check_committed(engine.run, checkpoint)
    if checkpoint.caution:
        say(f"   note  {checkpoint.caution}", streams.stderr())
