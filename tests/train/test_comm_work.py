"""What a step sends of gradients and weights, predicted to the byte before it is trained."""

from __future__ import annotations

import pytest

import phalanx
from phalanx.layout import Layout
from phalanx.train.comm_work import exact_bytes
from tests.parity import HostileLanguage
from tests.ranks import Ranks


def sent_in_a_step(layout: str) -> tuple[float, float, dict[str, int]]:
    """Bytes of gradients and of weights as they are predicted, and as they are counted."""
    with phalanx.Engine(HostileLanguage(steps=2), layout, device="cpu") as engine:
        work, axis, counted = engine.auto_comm.work, engine.auto_comm.group.name, dict[str, int]()
        for batch in engine.batches():
            before = engine.traffic.sent.copy()
            engine.step(batch)
            counted = {kind: n for (along, kind), n in (engine.traffic.sent - before).items() if along == axis}
        return work.sent, work.beside, counted


@pytest.mark.parametrize("layout", ["fsdp=2,zero=1", "fsdp=2,zero=2,micro_batch=4", "fsdp=2,zero=3,micro_batch=4"])
def test_gathers_and_scatters(ranks: Ranks, layout: str) -> None:
    for gradients, weights, counted in ranks(2, sent_in_a_step, f"{layout},comm=auto"):
        assert counted["reduce-scatter"] == gradients
        assert counted["all-gather"] == weights


def test_sums_over_replicas(ranks: Ranks) -> None:
    for gradients, weights, counted in ranks(4, sent_in_a_step, "dp=2,fsdp=2,zero=2,comm=auto"):
        assert counted == {"all-reduce": gradients}
        assert weights == 0


def straight(layout: str) -> tuple[float, dict[str, int]]:
    """What is predicted to go from rank to rank of what is encoded, and what was sent of it, by kind."""
    with phalanx.Engine(HostileLanguage(steps=2), f"{layout},comm=auto", device="cpu") as engine:
        engine.auto_comm.follow("int8")
        for batch in engine.batches():
            before = engine.traffic.sent.copy()
            engine.step(batch)
            counted = engine.traffic.sent - before
        axis = engine.auto_comm.group.name
        return engine.auto_comm.work.straight, {kind: n for (along, kind), n in counted.items() if along == axis}


def test_codes_of_sums_are_gathered_and_the_others_go_from_rank_to_rank(ranks: Ranks) -> None:
    for share, counted in ranks(2, straight, "dp=2"):
        assert counted["all-to-all"] / (counted["all-to-all"] + counted["all-gather"]) == share
    for share, counted in ranks(2, straight, "fsdp=2,zero=2"):
        assert share == 1
        assert counted["all-to-all"] > 0


def test_gradients_that_other_stages_add_to_travel_as_they_are(ranks: Ranks) -> None:
    for gradients, beside, counted in ranks(4, sent_in_a_step, "dp=2,pp=2,micro_batch=8,comm=auto"):
        assert sum(counted.values()) == gradients + beside
    assert any(beside for _, beside, _ in ranks(4, sent_in_a_step, "dp=2,pp=2,micro_batch=8,comm=auto"))


def sent_exactly(layout: str) -> tuple[dict[str, float], dict[str, int]]:
    """What this layout says that exact sums would send in a step, and what the same ranks do with them."""
    with phalanx.Engine(HostileLanguage(steps=2), layout, device="cpu") as engine:
        told = exact_bytes(engine)
    plain = layout.rpartition(",comm=")[0]
    with phalanx.Engine(HostileLanguage(steps=2), plain, device="cpu") as engine:
        *_, sent = (engine.step(batch).sent for batch in engine.batches())
        agreed = engine.traffic.sent["world", "all-reduce"] // 2
    return told, {axis: n - agreed * (axis == "world") for axis, n in sent.items() if axis in told}


@pytest.mark.parametrize(
    "layout",
    [
        "dp=2,fsdp=2,zero=2,comm=int4", "dp=2,fsdp=2,zero=3,micro_batch=4,comm=local:2", "dp=2,pp=2,comm=auto",
        "tp=2,fsdp=2,zero=1,comm=int8", "tp=2,fsdp=2,zero=3,micro_batch=4,comm=int4",
    ],
)  # fmt: skip
def test_what_exact_sums_would_send_is_what_they_do(ranks: Ranks, layout: str) -> None:
    for told, sent in ranks(4, sent_exactly, layout):
        assert told == sent
        assert list(told) == ["dp" if Layout.parse(layout).dp > 1 else "fsdp"]


def test_nothing_is_told_of_exact_sums(ranks: Ranks) -> None:
    assert ranks(2, sent_exactly, "dp=2,comm=exact") == [({}, {})] * 2
