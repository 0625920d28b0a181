"""Folders of runs as ranks leave them, made without training: for tests and a benchmark of what shows them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

from phalanx.run import Run

BEGAN = 1.7949e9
SECONDS = {"data": 0.004, "forward": 0.03, "backward": 0.06, "reduce": 2e-5, "update": 0.006}


def step(rank: int, number: int, draw: random.Random, slow: float = 1.0, **more: Any) -> dict[str, Any]:
    """A step's event, of a rank that writes what all share, or of another."""
    seconds = {phase: usual * draw.uniform(0.9, 1.2) * slow for phase, usual in SECONDS.items()}
    event = {"kind": "step", "time": BEGAN + 0.12 * number + draw.uniform(0.1, 0.11), "step": number}
    if rank == 0:
        loss = 1.5 + 4 * math.exp(-number / 300) + draw.uniform(-0.1, 0.1)
        event |= {
            "loss": loss, "losses": {}, "grad_norm": draw.uniform(0.5, 2), "clip_factor": 1.0,
            "lr": 1e-3 * min(1, (number + 1) / 100), "count": 4096, "slots": 16,
            "samples": f"{draw.getrandbits(64):016x}", "skipped": False, "bad": "",
        }  # fmt: skip
    event |= {"seconds": seconds, "sent": {"fsdp": 1_048_576, "tp": 262_144}}
    return event | ({"signals": [], "turn": "", **more} if rank == 0 else {})


def start(rank: int, world: int, at: int = 0, generation: int = 1) -> dict[str, Any]:
    return {
        "kind": "start", "time": BEGAN + 0.12 * at, "rank": rank, "world": world, "device": "cpu",
        "layout": f"fsdp={world}", "step": at, "source": "memory" if at else None, "generation": generation,
    }  # fmt: skip


def write(folder: Path, ranks: int, steps: int, slow: tuple[int, int] | None = None, **settings: Any) -> Run:
    """A run of so many ranks and steps; ``slow``: a rank and a step that took ten times as long."""
    run = Run(folder)
    (folder / "events").mkdir(parents=True)
    run.write_settings(
        {"run": {"task": "gpt", "layout": f"fsdp={ranks}"}, "settings": {"steps": steps, "seed": 0} | settings}
    )
    for rank in range(ranks):
        draw = random.Random(rank)
        events = [step(rank, number, draw, 10.0 if (rank, number) == slow else 1.0) for number in range(steps)]
        append(run, rank, start(rank, ranks), *events)
    return run


def append(run: Run, rank: int, *events: dict[str, Any]) -> None:
    with run.events_path(rank).open("a") as file:
        file.write("".join(json.dumps(event) + "\n" for event in events))
