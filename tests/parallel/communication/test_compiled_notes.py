"""What is compiled writes what its twin writes, byte for byte; without a compiler the twin is used, and it is said."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from phalanx import user_code
from phalanx.flight import BYTES, COMPILED, COMPILING, HAD, KINDS, MAGIC, PHASES, SPENT, Flight
from phalanx.parallel.communication import compiled_notes
from phalanx.parallel.communication.compiled_notes import PLAIN, Noting, agrees, compiled, fastest
from phalanx.parallel.communication.launched import Launches
from phalanx.parallel.communication.notes import Notes
from phalanx.parallel.communication.places import HERE, Places
from phalanx.parallel.communication.step_sums import StepSums

FILES = {
    "ours": f"{HERE}/communicator.py",
    "own": f"{user_code.OWN}/train/step.py",
    "root": f"{user_code.OWN}/launch/local.py",
    "user": __file__,
    "torch": torch.__file__,
}


def callers(file: str, lines: int) -> Callable[[Callable[[], Any], int], Any]:
    """A function of a file, which calls what it is given from any of so many lines; a rank's first, in `local`."""
    body = "\n".join(f"    if line == {line}: return call()" for line in range(lines))
    names: dict[str, Any] = {}
    exec(compile(f"def _rank(call, line):\n{body}", file, "exec"), names)
    return names["_rank"]


CALLERS = {name: callers(file, 60) for name, file in FILES.items()}


def tensors(drawn: random.Random) -> Any:
    shape = [drawn.choice([0, 1, 2, 3, 7]) for _ in range(drawn.randrange(7))]
    if drawn.random() < 0.05:
        shape = [2**33, *shape[:2]]
    dtype = drawn.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
    return torch.empty(shape, dtype=dtype, device="meta")


def sequence(drawn: random.Random, calls: int) -> list[tuple[Any, ...]]:
    """What a rank may be told, in any order: names of methods, what they are given, and from where they are called."""
    found: list[tuple[Any, ...]] = []
    for number in range(calls):
        name = drawn.choices(
            [
                "launched",
                "with",
                "recorded",
                "doing",
                "step",
                "waiting",
                "left",
                "arrived",
                "device",
                "graph",
                "elsewhere",
            ],
            [8, 8, 2, 2, 1, 3, 3, 1, 0.3, 0.1, 0.1],
        )[0]
        depth = drawn.choice([0, 1, 2, 3, 22])
        stack = [(drawn.choice(list(CALLERS)), drawn.randrange(60)) for _ in range(depth)]
        if drawn.random() < 0.7:  # mostly the same few places
            stack = [("user", number % 3), ("own", 1), ("own", number % 2), ("ours", 0)][drawn.randrange(4) :]
        group = f"group {int(60 * drawn.random() ** 4)}"
        given = group, group[-2:], 8, drawn.choice(KINDS[1:]), tensors(drawn)
        found.append((name, stack, given, drawn.random(), drawn.random(), drawn.choice(PHASES)))
    return found


def act(
    notes: Notes, launches: Launches, name: str, given: Any, first: float, second: float, phase: str, old: int
) -> Any:
    if name == "launched":
        on_gpu = SimpleNamespace(is_cuda=True, shape=given[-1].shape, dtype=given[-1].dtype)
        return notes.launched(*given[:-1], on_gpu if first < 0.3 else given[-1], awaited=second < 0.5)
    if name in ("with", "recorded"):
        share = first if second < 0.5 else int(10 * first)
        launched = launches.recorded(*given) if name == "recorded" else launches.launched(*given, share)
        with suppress(ZeroDivisionError), launched:
            return 1 // int(10 * second)
        return -1
    if name == "doing":
        return notes.doing(phase)
    if name == "step":
        notes.step = int(100 * first) if second < 0.1 else notes.step + 1
        return notes.step
    if name == "graph":
        launches.in_graph = not launches.in_graph and first < 0.5
        return launches.in_graph
    if name == "device":
        return notes.on_device(int(1e9 * first), int(1e9 * second))
    if name == "elsewhere":
        thread = threading.Thread(target=notes.left, args=(old,))
        thread.start()
        return thread.join()
    return getattr(notes, name)(old, *((second < 0.3,) if name == "left" else ()))


act.__code__ = act.__code__.replace(co_filename=FILES["ours"])  # else every call would be a line of the user's


def written(way: Noting, told: list[tuple[Any, ...]]) -> list[Any]:
    """All that can be seen after a sequence."""
    memory, signs, watched = memoryview(bytearray(BYTES)), memoryview(bytearray(24)).cast("q"), []
    sums = StepSums(memory.cast("q"), "")
    notes = way.Notes(memory, Places(memory), sums, count(10**12, 997).__next__)
    launches = way.Launches(notes, signs, None, lambda *_: None)

    @contextmanager
    def entered(axis: str, kind: str):
        watched.append((axis, kind))
        yield
        watched.append(bytes(signs))

    launches.watchers.append(lambda axis, kind, tensor: watched.append((axis, kind, tensor.shape)))
    records, answers = [48], []
    for name, stack, given, first, second, phase in told:
        old = records[-1 - int(first**8 * (len(records) - 1))]
        launches.wait_watchers[:] = [entered] if second < 0.1 else []
        call = partial(act, notes, launches, name, given, first, second, phase, old)
        for file, line in reversed(stack):
            call = partial(CALLERS[file], call, line)
        answers.append(call())
        if name == "launched":
            records.append(answers[-1])
    with pytest.raises(KeyError):
        notes.doing("sleeping")
    return [
        bytes(memory), *map(list, (sums.spent, sums.waited, sums.along, sums.beside)), signs.tolist(),
        launches.sent, launches.calls, watched, answers,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def way() -> Noting:
    try:
        return compiled(seconds=60)
    except RuntimeError as error:
        pytest.skip(str(error))


def test_it_is_its_twin_byte_for_byte(way: Noting) -> None:
    seed = random.randrange(10**9)
    told = sequence(random.Random(seed), 6000)
    plain, own = written(PLAIN, told), written(way, told)
    for number, (one, other) in enumerate(zip(plain, own, strict=True)):
        assert one == other, f"seed {seed}, part {number}"
    record = Flight.of(MAGIC + own[0][8:])
    assert len({record.launch(each).place for each in record.collectives}) > 20
    assert agrees(way)


def test_what_a_step_had_of_a_processor_and_compiled_is_noted(way: Noting) -> None:
    double = torch.compile(lambda numbers: numbers * 2, backend="eager", dynamic=False)
    memory = memoryview(bytearray(BYTES))
    notes = way.Notes(memory, Places(memory), StepSums(memory.cast("q")))
    for step in range(3):
        notes.step = step
        notes.doing("data")
        if step == 0:
            double(torch.ones(3))
            double(torch.ones(4))
        elif step == 1:
            time.sleep(0.2)
    steps = Flight.of(MAGIC + bytes(memory)[8:]).steps
    assert steps[:2, COMPILED].tolist() == [2, 0]
    assert steps[0, COMPILING] > 0 == steps[1, COMPILING]
    assert 0 < steps[1, HAD] < 0.1e9
    assert steps[1, SPENT + 1] > 0.2e9


def test_one_that_writes_something_else_is_not_used(way: Noting) -> None:
    class Late(Notes):
        def doing(self, phase: str) -> str:
            self._clock()
            return super().doing(phase)

    assert agrees(PLAIN)
    assert not agrees(Noting(Late, PLAIN.Launches))


def test_without_a_compiler_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    monkeypatch.setenv("CC", "no-compiler")
    fastest.cache_clear()
    try:
        with pytest.warns(
            UserWarning, match=r"noted in the flight record by Python.*Install a C compiler and Python's"
        ):
            assert fastest() is PLAIN
        assert fastest() is PLAIN  # and said once
    finally:
        fastest.cache_clear()
    assert "building" in {path.name for path in tmp_path.glob("*/*")}
    assert compiled_notes.SOURCE.exists()
