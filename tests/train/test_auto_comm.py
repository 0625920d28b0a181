"""``comm=auto``: all ranks choose alike, change when the link does, and go on with what they had."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

import phalanx
from phalanx.parallel.communication import links
from phalanx.parallel.communication.choosing import Conditions
from phalanx.parallel.communication.codecs import speed
from phalanx.parallel.communication.codecs.blockwise import Blockwise
from phalanx.parallel.communication.communicator import Communicator
from phalanx.train import auto_comm
from phalanx.train.auto_comm import StepSeconds
from phalanx.train.checkpointing import save
from phalanx.train.restoring import load
from phalanx.train.step import Metrics
from tests.parity import HostileLanguage
from tests.ranks import Ranks
from tests.tasks import Digits

SLOW, FAST = 1e4, 1e12
STEPS = 24


def on_a_link(rates: dict[int, float], layout: str = "dp=2", **options: Any) -> list[tuple[float, str]]:
    """Each step's loss and the method after it, on a link that is measured to have these rates from steps on."""
    at = [0]

    def along(group: Communicator, device: torch.device, size: int = 1) -> links.Speed:
        rate = rates[max(step for step in rates if step <= at[0])]
        return links.Speed(1e-4, rate * (1 + group.rank), size)  # ranks measure something else each

    with (
        pytest.MonkeyPatch.context() as patch,
        phalanx.Engine(Digits(width=64, steps=STEPS), f"{layout},comm=auto", device="cpu", **options) as engine,
    ):
        patch.setattr(links, "along", along)
        patch.setattr(auto_comm, "LEAST_STEPS", 2)
        patch.setattr(auto_comm, "SHARE", 1e9)
        patch.setattr(auto_comm.AutoComm, "_judge", lambda *_: None)  # the link is not the one that they are told of
        found = []
        for batch in engine.batches():
            at[0] = batch.step
            found.append((engine.step(batch).loss, engine.auto_comm.method))
        told = list[str]()
        engine.auto_comm.tell(lambda kind, **facts: told.append(facts["method"]), lambda line: None)
        assert told == [method for method, _ in groupby(method for _, method in found[5:])]
        return found


def test_a_link_that_becomes_slow_and_fast_again(ranks: Ranks) -> None:
    first, second = ranks(2, on_a_link, {0: FAST, 8: SLOW})
    assert first == second
    assert first[7][1] == "exact"
    assert first[-1][1] == "int4"
    plain = ranks(2, exactly)[0]
    assert [loss for loss, _ in first[:8]] == pytest.approx(plain[:8], rel=1e-6)
    assert [loss for loss, _ in first] == pytest.approx(plain, rel=0.05)
    assert ranks(2, on_a_link, {0: SLOW, 12: FAST})[0][-1][1] == "exact"


@pytest.mark.parametrize("zero", [2, 3])
def test_over_shards_too(ranks: Ranks, zero: int) -> None:
    layout = f"fsdp=2,zero={zero}"
    first, second = ranks(2, on_a_link, {0: FAST, 8: SLOW, 16: FAST}, layout)
    assert first == second
    assert first[7][1] == first[-1][1] == "exact"
    assert "int4" in [method for _, method in first]
    plain = ranks(2, exactly, layout)[0]
    assert [loss for loss, _ in first[:8]] == pytest.approx(plain[:8], rel=1e-6)
    assert [loss for loss, _ in first] == pytest.approx(plain, rel=0.05)
    assert ranks(2, tolerant, 0.0, layout) == ["int8", "int8"]


def on_two_hosts(hosts_first: float) -> str:
    """The method that is chosen on a slow link, where collectives inside of hosts first are measured to be so fast."""

    def measured(group: Communicator, device: torch.device, link: links.Speed) -> float:
        assert group.hosts_first
        return hosts_first * (1 + group.rank)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHALANX_HOSTS", "2,2")
        patch.setattr(links, "hosts_first", measured)
        return on_a_link({0: SLOW}, "dp=4")[-1][1]


def test_exact_sums_are_predicted_by_the_way_they_take(ranks: Ranks) -> None:
    assert ranks(4, on_two_hosts, FAST) == ["exact"] * 4
    assert ranks(4, on_two_hosts, SLOW) == ["int4"] * 4


def exactly(layout: str = "dp=2") -> list[float]:
    with phalanx.Engine(Digits(width=64, steps=STEPS), layout, device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()]


def test_no_more_loss_than_is_allowed(ranks: Ranks) -> None:
    assert ranks(2, tolerant, 0.0) == ["int8", "int8"]


def tolerant(tolerance: float, layout: str = "dp=2") -> str:
    return on_a_link({0: SLOW}, layout, loss_tolerance=tolerance)[-1][1]


def interrupted(layout: str, folder: str, resume: bool) -> list[float]:
    """Steps with int4, saved half way; or the second half of them."""
    with phalanx.Engine(Digits(width=64), f"{layout},comm=auto", device="cpu") as engine:
        if resume:
            load(engine, folder)
            assert engine.auto_comm.method == "int4"
            assert "int4 from step 3 on: the saved state was made with it" in str(engine.auto_comm.news.pop())
        else:
            engine.auto_comm.restore({"method": "int4"})
        losses = []
        for batch in engine.batches():
            if engine.step_number == 2 and not resume:
                save(engine, folder)
            if engine.step_number == 3:
                engine.auto_comm.restore({"method": "exact"})  # what is owed is settled in this step
            losses.append(engine.step(batch).loss)
        return losses[-2:]


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2", "fsdp=2,zero=2"])
def test_a_run_goes_on_with_its_method_and_with_what_it_owed(ranks: Ranks, tmp_path: Path, layout: str) -> None:
    through = ranks(2, interrupted, layout, str(tmp_path / "state"), False)
    assert ranks(2, interrupted, layout, str(tmp_path / "state"), True) == through


def measured() -> tuple[str, float, float]:
    with phalanx.Engine(Digits(width=64, steps=12), "dp=2,comm=auto", device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        (chosen,) = list(engine.auto_comm.news)[:1]
        assert chosen.method in chosen.predicted
        assert "Mbit/s" in str(chosen)
        return chosen.method, chosen.megabits, chosen.predicted["exact"]


def test_the_link_itself_is_measured_alike(ranks: Ranks) -> None:
    first, second = ranks(2, measured)
    assert first == second
    assert first[1] > 1


def by_stages() -> tuple[list[tuple[str, dict[str, float]]], float]:
    """What was chosen, and why, where the stages of a pipeline do not have as many weights; and this stage's."""
    layout = "dp=2,pp=2,micro_batch=4,comm=auto"
    with (
        pytest.MonkeyPatch.context() as patch,
        phalanx.Engine(HostileLanguage(steps=12), layout, device="cpu") as engine,
    ):
        patch.setattr(links, "along", lambda group, device, size=1: links.Speed(1e-4, 1e6 * (1 + group.rank), size))
        patch.setattr(speed, "seconds", lambda codec, device: (1e-6, 1e-6))
        for batch in engine.batches():
            engine.step(batch)
        chosen = [(each.method, each.predicted) for each in engine.auto_comm.news]
        return chosen, engine.auto_comm.work.sent


def test_stages_of_a_pipeline_choose_alike(ranks: Ranks) -> None:
    found = ranks(4, by_stages)
    assert len({sent for _, sent in found}) > 1, "the stages are alike, so nothing is tried"
    assert all(chosen == found[0][0] for chosen, _ in found)
    assert found[0][0]


def misled() -> tuple[list[str], list[bool], str]:
    """Methods by step where a link is said to be slow, and a codec is not as fast as it seems; when memory was had."""
    encode = Blockwise.encode

    def slow(self: Blockwise, x: torch.Tensor, *rest: Any) -> None:
        time.sleep(0.02)
        encode(self, x, *rest)

    with (
        pytest.MonkeyPatch.context() as patch,
        phalanx.Engine(Digits(width=64, steps=STEPS), "dp=2,comm=auto", device="cpu") as engine,
    ):
        patch.setattr(links, "along", lambda group, device, size=1: links.Speed(1e-4, SLOW, size))
        patch.setattr(auto_comm, "LEAST_STEPS", 2)
        patch.setattr(auto_comm, "SHARE", 1e9)
        patch.setattr(speed, "seconds", lambda codec, device: (1e-6, 1e-6))
        patch.setattr(Blockwise, "encode", slow)
        methods, memory = list[str](), list[bool]()
        for batch in engine.batches():
            engine.step(batch)
            methods.append(engine.auto_comm.method)
            owed = [each for bucket in engine.spread.buckets if bucket.coded for each in bucket.coded.all_owed()]
            memory.append(any(each.rooms() for each in owed))
        return methods, memory, str(engine.auto_comm.news[1])


def test_what_makes_steps_longer_is_left_again(ranks: Ranks) -> None:
    first, second = ranks(2, misled)
    assert first == second
    methods, memory, told = first
    assert list(dict.fromkeys(methods)) == ["exact", "int4"], methods
    assert methods[-1] == "exact"
    assert methods[methods.index("int4") :].index("exact") <= 8, "it takes few steps to see it"
    assert [method for method, _ in groupby(methods)].count("int4") <= 3, "it is tried again more and more rarely"
    assert "a step took with exact" in told
    assert memory.index(True) == methods.index("int4") + 1, "int4 takes memory when it is chosen"


Seconds = Callable[[str, int], float]
"""Of a step, by its method and number."""


def told(method: str, step: int) -> float:
    return {"exact": 0.3, "bf16": 0.1, "int8": 0.099, "int4": 0.098}[method]


def simulated(taken: Seconds, told: Seconds, steps: int, due: int) -> list[str]:
    """Methods by step where steps take that, and are told to. The link is measured again after ``due`` steps."""

    def seconds(metrics: Metrics, axis: str) -> StepSeconds:
        return StepSeconds(taken(engine.auto_comm.method, metrics.step), 0.0, 0.0)

    with (
        pytest.MonkeyPatch.context() as patch,
        phalanx.Engine(Digits(width=8, steps=steps), "dp=2,comm=auto", device="cpu") as engine,
    ):
        patch.setattr(StepSeconds, "of", seconds)
        patch.setattr(Conditions, "predicted", lambda self, method, codec: told(method.name, engine.step_number))
        patch.setattr(links, "along", lambda group, device, size=1: links.Speed(1e-4, FAST, size))
        patch.setattr(auto_comm, "LEAST_STEPS", due)
        patch.setattr(auto_comm, "SHARE", 1e9)
        return [engine.auto_comm.method for batch in engine.batches() if engine.step(batch)]


def turns(ranks: Ranks, taken: Seconds, steps: int = 60, due: int = 1000, told: Seconds = told) -> list[str]:
    """The methods of `simulated`, each once for as long as it is used."""
    first, second = ranks(2, simulated, taken, told, steps, due)
    assert first == second
    return [method for method, _ in groupby(first)]


def bf16_hides_less(method: str, step: int) -> float:
    return {"exact": 0.3, "bf16": 0.2, "int8": 0.1, "int4": 0.1}[method]


def test_what_does_not_hide_what_it_should_is_left_for_the_next(ranks: Ranks) -> None:
    assert turns(ranks, bf16_hides_less) == ["exact", "bf16", "int8"]


def none_hides_more(method: str, step: int) -> float:
    return 0.3 if method == "exact" else 0.2


def test_where_none_hides_more_the_most_exact_is_kept(ranks: Ranks) -> None:
    assert turns(ranks, none_hides_more) == ["exact", "bf16", "int8", "int4", "bf16"]


def test_what_was_tried_is_tried_again_more_and_more_rarely(ranks: Ranks) -> None:
    found = turns(ranks, none_hides_more, 400, 10)
    assert found[:5] == ["exact", "bf16", "int8", "int4", "bf16"]
    assert found[-1] == "bf16"
    assert 2 <= found.count("int4") <= 7, found


def stalled(method: str, step: int) -> float:
    return 0.4 if method == "bf16" and step < 16 else {"exact": 0.3, "bf16": 0.1, "int8": 0.2, "int4": 0.2}[method]


def test_a_stall_is_forgotten(ranks: Ranks) -> None:
    found = turns(ranks, stalled, 100, 20)
    assert found[:3] == ["exact", "bf16", "int8"]
    assert found[-1] == "bf16"


def stalled_late(method: str, step: int) -> float:
    """After others were tried some times in the place of bf16, which is slow for a while, and is left."""
    slow = method == "bf16" and 200 <= step < 240
    return 0.5 if slow else none_hides_more(method, step) - 0.01 * (method == "bf16")


def test_one_that_was_in_use_for_long_is_taken_up_again_after_a_stall(ranks: Ranks) -> None:
    found = turns(ranks, stalled_late, 320, 10)
    assert found[-1] == "bf16"


def slow_at_first(method: str, step: int) -> float:
    return {"exact": 0.3, "bf16": 0.19, "int8": 0.15, "int4": 0.1}[method] * (2 if step < 10 else 1)


def test_steps_that_are_slow_at_first_are_forgotten(ranks: Ranks) -> None:
    assert turns(ranks, slow_at_first, 100, 20)[-1] == "int4"


def ever_longer(method: str, step: int) -> float:
    return 1.2 * longer_told(method, step)


def longer_told(method: str, step: int) -> float:
    return told(method, step) * 1.01**step


def test_steps_that_become_longer_and_longer_are_not_the_methods_fault(ranks: Ranks) -> None:
    found = turns(ranks, ever_longer, 200, 20, longer_told)
    assert len(found) <= 16, f"40 if it went round and round: {found}"
