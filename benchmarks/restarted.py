"""The same engine under torchrun, in a loop of one's own that saves with torch.save every few steps.

torchrun ... benchmarks/restarted.py FOLDER EVERY

``FOLDER`` has a ``task.py``, and gets the events and the state.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

import phalanx
from phalanx.events import EventLog
from phalanx.references import find_task
from phalanx.run import Run

folder, every = Path(sys.argv[1]), int(sys.argv[2])
path, saved = folder / "run", folder / "run" / "state.pt"
engine = phalanx.Engine(find_task(str(folder / "task.py"))(), device="cpu")
log = EventLog(Run(path), engine.environment.rank)
shards = {name: weight.shard for name, weight in engine.spread.weights.items()}
if saved.exists():
    state = torch.load(saved)
    for name, shard in shards.items():
        shard.data.copy_(state["model"][name])
    engine.optimizer.load_state_dict(state["optimizer"])
    engine.spread.updated()
    engine.step_number = state["step"]
log.write("start", step=engine.step_number)
for batch in engine.batches():
    log.write("step", **asdict(engine.step(batch)))
    if engine.step_number % every == 0 and engine.environment.rank == 0:
        model = {name: shard.data for name, shard in shards.items()}
        state = {"step": engine.step_number, "model": model, "optimizer": engine.optimizer.state_dict()}
        torch.save(state, path / "unfinished.pt")
        os.replace(path / "unfinished.pt", saved)
