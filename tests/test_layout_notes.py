"""What is said of a layout's settings that do nothing, or cost more than they need."""

from __future__ import annotations

import pytest

from phalanx import Layout
from phalanx.layout_notes import layout_notes


@pytest.mark.parametrize(
    ("layout", "device", "said"),
    [
        ("dp=2,zero=1", "cuda", "zero=1 has no effect at fsdp=1,cp=1"),
        ("dp=2,schedule=zb", "cuda", "schedule=zb has no effect at pp=1"),
        ("dp=1,compile=blocks,recompute=selective", "cuda", "recompute=selective has no effect with compile=blocks"),
        ("dp=1,graphs=step", "cpu", "graphs=step has no effect on a CPU"),
        ("dp=1,recompute=host", "cpu", "recompute=host is recompute=full on a CPU"),
        ("dp=1,offload=params", "cpu", "offload=params saves nothing on a CPU"),
        ("dp=1,comm=int8", "cuda", "comm=int8 has no effect at dp=1,fsdp=1"),
        ("dp=2,activations=bf16", "cuda", "activations=bf16 has no effect at pp=1,ep=1"),
        ("pp=4", "cuda", "pp=4 leaves ranks idle at least"),
    ],
)
def test_one_line_says_it(layout: str, device: str, said: str) -> None:
    (note,) = layout_notes(Layout.parse(layout), device)
    assert note.startswith(said)


@pytest.mark.parametrize("layout", ["dp=2", "fsdp=2,zero=2", "dp=1,graphs=step", "dp=1,offload=params"])
def test_nothing_is_said_of_what_works(layout: str) -> None:
    assert layout_notes(Layout.parse(layout), "cuda") == []


def test_a_stream_that_is_narrow_is_said() -> None:
    notes = {text: layout_notes(Layout.parse(f"pp=2,activations={text}"), "cuda", stream=2) for text in ("bf16", "fp8")}
    assert notes["bf16"][1:] == ["activations=bf16 has no effect: the stream has 16 bits by itself"]
    assert not notes["fp8"][1:]


@pytest.mark.parametrize(
    ("layout", "hosts", "said"),
    [
        ("dp=5", [0, 0, 0, 1, 1], "dp=5 has 3, 2 ranks on 2 hosts, so they sum in one ring over all of them"),
        ("dp=4,comm=int4", [0, 0, 1, 1], "comm=int4 sends codes of each of the 2 ranks on each of 2 hosts"),
        ("dp=4,comm=int4", [0, 0, 1, 1], "dp=2,fsdp=2,zero=2,comm=int4 sums inside of hosts stay exact, and 2/3 as"),
    ],
)
def test_replicas_that_share_hosts(layout: str, hosts: list[int], said: str) -> None:
    assert said in layout_notes(Layout.parse(layout), "cpu", hosts=hosts)[-1]


@pytest.mark.parametrize(
    ("layout", "hosts"), [("dp=4", [0, 0, 1, 1]), ("dp=4", [0, 0, 0, 0]), ("dp=3", [0, 1, 2]), ("dp=2,fsdp=2", [0, 1])]
)
def test_nothing_is_said_of_replicas_that_sum_inside_of_hosts(layout: str, hosts: list[int]) -> None:
    assert layout_notes(Layout.parse(layout), "cpu", hosts=hosts) == []


@pytest.mark.parametrize(("hosts", "said"), [([0, 0, 1], True), ([0, 0, 1, 1], False), ([0, 1], False), ([], False)])
def test_ranks_that_share_the_state_on_uneven_hosts(hosts: list[int], said: bool) -> None:
    layout = Layout.parse(f"fsdp={len(hosts) or 2}")
    words = "fsdp=3 has 2, 1 ranks on 2 hosts, so each of them gets every row from"
    assert [words in note for note in layout_notes(layout, "cpu", shard_hosts=hosts)] == [True] * said
    assert not layout_notes(layout, "cuda", shard_hosts=hosts)


@pytest.mark.parametrize("comm", ["auto", "powersgd:2"])
def test_methods_that_sum_inside_of_hosts_too_are_not_advised_against(comm: str) -> None:
    assert not any(
        "sends codes" in note for note in layout_notes(Layout.parse(f"dp=4,comm={comm}"), "cpu", hosts=[0, 0, 1, 1])
    )
