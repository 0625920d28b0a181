"""Lines read at once have the numbers that reading each as JSON gives."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.event_fields import is_event
from phalanx.watch.page.lines import FEWEST, read

numbers = st.one_of(
    st.integers(0, 10**15), st.floats(0, 1e6, allow_nan=False), st.floats(1e-12, 1e-3), st.floats(-10, 10),
    st.sampled_from([0, 0.0, 1.0, 1e-5, 5e-324, 1e22, 1e-100, True, None, "nan", "inf", "a:1", "e", "", {}, []]),
)  # fmt: skip
names = st.sampled_from(["data", "date", "wait", "top1", "top5", "e", "a.b", "é", 'say "x"', "1"])
events = st.fixed_dictionaries(
    {"kind": st.just("step"), "step": st.integers(0, 10**6), "seconds": st.dictionaries(names, numbers, max_size=4)},
    optional={"loss": numbers, "turn": st.sampled_from(["", "net", "net1", "net2"]), "signals": st.just([1, 2])},
)


def at(event: dict[str, Any], name: tuple[str, ...]) -> Any:
    found: Any = event
    for word in name:
        found = found[word]
    return found


def check(events: list[dict[str, Any]]) -> int:
    """Every line that is an event is read once, rightly; how many were read at once."""
    many, single = read("".join(json.dumps(event) + "\n" for event in events).encode())
    seen = [number for number, _ in single]
    for number, event in single:
        assert event == events[number]
    for columns in many:
        seen += columns.lines.tolist()
        for place, number in enumerate(columns.lines):
            own = {name: values[place] for name, values in columns.values.items()}
            for name, value in own.items():
                assert np.isclose(
                    value, at(events[number], name), rtol=1e-9, atol=1e-8 if name[0] == "seconds" else 1e-13
                ), (name, events[number])
            own[("samples",)] = None
            assert _without(events[number], own) == _without(columns.first, own), "what is no number is the same"
    assert len(seen) == len(set(seen))
    assert {number for number, event in enumerate(events) if is_event(event)} <= set(seen)
    return sum(len(columns.lines) for columns in many)


def _without(event: dict[str, Any], names: Any, above: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        name: _without(value, names, (*above, name)) if isinstance(value, dict) else value
        for name, value in event.items()
        if (*above, name) not in names
    }


@given(st.lists(events, max_size=40))
def test_any_events(found: list[dict[str, Any]]) -> None:
    check(found)


@given(st.lists(st.sampled_from(["data", "date", "top1", "top5"]), min_size=3, max_size=3), st.data())
def test_names_that_differ_in_a_digit_alone_are_told_apart(chosen: list[str], data: st.DataObject) -> None:
    values = data.draw(st.lists(st.floats(0.01, 9), min_size=60, max_size=60))
    check([{"kind": "step", "step": n, "logged": {chosen[n % 3]: value}} for n, value in enumerate(values)])


@given(st.lists(st.floats(1e-9, 1e9), min_size=4 * FEWEST, max_size=4 * FEWEST))
def test_numbers_of_any_size(values: list[float]) -> None:
    check([{"kind": "step", "time": 1.7e9 + value % 1, "step": n, "x": value} for n, value in enumerate(values)])


def test_a_ranks_steps_are_read_at_once() -> None:
    found = [
        {"kind": "step", "step": n, "seconds": {"data": 0.01 + n / 7, "reduce": 1e-6 * (n + 0.5)}} for n in range(80)
    ]
    assert check([{"kind": "start", "step": 0}, *found]) in (79, 80), "the last may come by itself"


def test_what_is_not_wanted_is_not_read() -> None:
    lines = [{"kind": "step", "step": n, "loss": "nan" if n % 3 else -n / 7, "samples": f"{n:016x}"} for n in range(90)]
    many, _ = read("".join(json.dumps(event) + "\n" for event in lines).encode(), {"step"}.__contains__)
    assert [list(columns.values) for columns in many] == [[("step",)], [("step",)]]
    assert sorted(len(columns.lines) for columns in many) in ([29, 59], [30, 59], [29, 60], [30, 60])
    check(lines)


def test_cut_and_foreign_lines_are_no_events() -> None:
    good = b'{"kind": "step", "step": 1}\n'
    many, single = read(good + b'{"kind": "step", "st\n' + b"[1, 2]\n" + b"\xff\xfe\n" + b"\n" + good)
    assert not many
    assert single == [(0, {"kind": "step", "step": 1}), (5, {"kind": "step", "step": 1})]
    assert read(b"") == ([], [])


def test_what_is_no_step_comes_by_itself_however_many_there_are() -> None:
    saved = [{"kind": "checkpoint", "step": n, "seconds": 0.5} for n in range(3 * FEWEST)]
    assert check(saved) == 0
    assert check([{"kind": "step", "step": n, "seconds": {"data": 0.5 + n}} for n in range(20_000)]) >= 19_998, "blocks"
