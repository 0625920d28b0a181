"""`notes` and `launched` compiled from C, when they are first used; where that cannot be, as they are.

The numbers of the record's layout are handed to the compiler, so they are written down once, in `flight`.
"""

from __future__ import annotations

import sysconfig
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import count
from pathlib import Path
from typing import NamedTuple

import torch

from phalanx import flight
from phalanx.kernels.compiled import built, loaded
from phalanx.parallel.communication import notes, places
from phalanx.parallel.communication.launched import Launches
from phalanx.parallel.communication.notes import Notes
from phalanx.parallel.communication.step_sums import StepSums

SOURCE = Path(__file__).parent / "c" / "notes.c"
SECONDS = 1.0
"""A run's start is not held up for longer; a third of one is usual, and once for a host."""
NUMBERS = (
    "GROUPS", "SITES", "RECORDS", "NOW_AT", "DOING", "SINCE", "STEP", "GROUPS_AT", "GROUP_BYTES", "RECORDS_AT",
    "MOST_PHASES", "PHASE", "ON_GPU", "BYTES", "FIRST", "STEPS", "STEPS_AT", "NUMBERS_A_STEP", "HAD", "QUEUED",
    "COMPILED", "COMPILING", "ON_DEVICE", "DEVICE_WAITED", "SPENT", "WAITED", "WAITED_ALONG",
)  # fmt: skip
"""Of `flight`, those that the C goes by."""


class Noting(NamedTuple):
    """Who notes: these classes, or compiled ones that do the same."""

    Notes: type[Notes]
    Launches: type[Launches]


PLAIN = Noting(Notes, Launches)


@cache
def fastest() -> Noting:
    """What was compiled, here or before; the plain twins where it cannot be."""
    found = loaded(SOURCE, _checked, "collectives are noted in the flight record by Python, ten times slower")
    return found or PLAIN


def compiled(seconds: float) -> Noting:
    """What the C gives, built within so many seconds."""
    name = "phalanx_notes"
    spec = spec_from_loader(name, ExtensionFileLoader(name, str(_library(seconds))))
    assert spec is not None
    module = module_from_spec(spec)
    return Noting(module.Notes, module.Launches)


def _library(seconds: float) -> Path:
    known = {name: getattr(flight, name) for name in NUMBERS}
    known |= {name: getattr(places, name) for name in ("OURS", "OTHERS", "USERS", "ROOT")}
    known |= {"DEEPEST": notes.DEEPEST, "TRIES": notes.TRIES}
    known |= {"GROUP_SIZE": flight.GROUP.size, "RECORD_SIZE": flight.RECORD.size, "FLAGS_AT": flight.FLAGS}
    python = f"-DSOABI={sysconfig.get_config_var('SOABI')}"
    flags = ["-O1", "-std=gnu11", python, *(f"-D{name}={value}" for name, value in known.items())]
    headers = dict.fromkeys(sysconfig.get_path(name) for name in ("include", "platinclude"))
    return built(SOURCE, flags, list(headers), seconds)


def _checked() -> Noting:
    found = compiled(SECONDS)
    if not agrees(found):
        raise RuntimeError("it does not note what its plain twin does")
    return found


def agrees(way: Noting) -> bool:
    """Whether it writes what the twin writes, for a few collectives."""
    memories = []
    for each in (PLAIN, way):
        memory = memoryview(bytearray(flight.BYTES))
        sums = StepSums(memory.cast("q"), "")
        noting = each.Notes(memory, places.Places(memory), sums, count(10**9, 1000).__next__)
        launches = each.Launches(noting, memoryview(bytearray(24)).cast("q"), None, lambda *_: None)
        for step in range(3):
            noting.step = step
            noting.doing("data" if step else "start-up")
            with launches.launched("a", "dp", 2, "all-reduce", torch.empty(2, 3, dtype=torch.bfloat16), 0.5):
                pass
        memories.append((bytes(memory), launches.sent, sums.along))
    return memories[0] == memories[1]
