"""The method is the most exact that a link keeps up with."""

from __future__ import annotations

import pytest

from phalanx.comm_methods import CANDIDATES, allowed
from phalanx.parallel.communication.choosing import Conditions, Experience, MethodTrial, bucket_bytes, choose

CODEC = {"exact": 0.0, "bf16": 0.03, "int8": 0.03, "int4": 0.03}


def chosen(megabits: float, current: str = "", latency: float = 1e-4, tolerance: float = 0.5) -> str:
    """For 10 million weights of which a step computes 250 ms, 165 of them backward."""
    conditions = Conditions(0.25, 0.165, 43e6, megabits * 1e6 / 8, latency)
    methods = allowed(tolerance)
    return choose({each.name: conditions.predicted(each, CODEC[each.name]) for each in methods}, methods, current)


@pytest.mark.parametrize(
    ("megabits", "method"), [(20_000, "exact"), (2_500, "exact"), (1_000, "bf16"), (600, "int8"), (100, "int4")]
)
def test_the_slower_the_link_the_fewer_the_bytes(megabits: float, method: str) -> None:
    assert chosen(megabits) == method


def test_a_method_in_use_is_left_for_a_gain_alone() -> None:
    assert chosen(1_400) == "bf16" != chosen(1_800, "exact") == "exact"
    assert chosen(100, "int8") == "int4"
    assert chosen(20_000, "int4") == "exact"


def test_no_method_that_changes_the_loss_by_more_than_is_allowed() -> None:
    assert chosen(100, tolerance=0.0) == "int8"
    assert [method.name for method in allowed(0.5)] == [method.name for method in CANDIDATES]


def test_what_is_left_when_latency_is_all_there_is_stays_exact() -> None:
    assert chosen(20_000, latency=0.2) == "exact"


def seconds(method: str, straight: float = 1.0, hosts_first: float | None = None) -> float:
    """Of a step that computes nothing and has no codec, of 40 MB of gradients and 10 of weights."""
    conditions = Conditions(0.0, 0.0, 40e6, 10e6, 0.0, 10e6, hosts_first, straight)
    return conditions.predicted(next(each for each in CANDIDATES if each.name == method), 0.0)


def test_what_goes_inside_of_hosts_first_is_predicted_by_its_own_rate() -> None:
    assert seconds("exact") == pytest.approx(5)
    assert seconds("exact", hosts_first=20e6) == pytest.approx(2.5)
    assert seconds("bf16", hosts_first=20e6) == pytest.approx(2 + 0.5)
    assert seconds("bf16", straight=1 / 2, hosts_first=20e6) == pytest.approx(1 + 0.5 + 0.5)


@pytest.mark.parametrize(
    ("megabits", "latency", "megabytes"),
    [(100, 1e-4, 4), (100, 0.05, 4), (1_000, 1e-4, 4), (200, 0.05, 8), (1_000, 0.05, 25), (20_000, 1e-4, 25)],
)
def test_buckets_are_about_what_a_link_holds(megabits: float, latency: float, megabytes: int) -> None:
    assert bucket_bytes(latency, megabits * 1e6 / 8, 25 << 20) == megabytes << 20


PREDICTED = {"exact": 0.3, "bf16": 0.1, "int8": 0.099, "int4": 0.098}


def test_what_was_learned_is_forgotten_later_each_time() -> None:
    experience = Experience()
    experience.measured(1e8, "exact")
    for waits in (1, 2, 4):
        experience.learn("int8", 0.2, 0.1)
        for _ in range(waits):
            assert experience.corrected({"int8": 0.1}) == {"int8": pytest.approx(0.2)}
            experience.measured(1e8, "bf16")
        assert "int8" not in experience


def test_of_the_method_in_use_it_is_kept_until_the_link_is_another() -> None:
    experience = Experience()
    experience.measured(1e8, "exact")
    experience.learn("bf16", 0.2, 0.1)
    for _ in range(5):
        experience.measured(1.5e8, "bf16")
    assert "bf16" in experience
    experience.measured(2.1e8, "bf16")
    assert "bf16" not in experience


def test_each_is_tried_once_at_most_and_the_most_exact_kept_of_those_that_are_as_good() -> None:
    methods, experience = allowed(0.5), Experience()
    trial, own, order = MethodTrial({"exact": 0.3}, PREDICTED), "bf16", ["bf16"]
    while True:
        own, following = trial.judged(own, 0.2, experience, methods)
        order.append(own)
        if following is None:
            break
        trial = following
    assert order == ["bf16", "int8", "int4", "bf16"]


def test_one_in_use_is_forgotten_soon_however_often_others_were_tried() -> None:
    methods, experience = allowed(0.5), Experience()
    experience.measured(1e8, "exact")
    for _ in range(8):
        for own in ("int8", "int4"):
            assert MethodTrial({"bf16": 0.1}, PREDICTED).judged(own, 0.2, experience, methods)[0] == "bf16"
    wanted, _ = MethodTrial({"bf16": 0.4}, PREDICTED).judged("int8", 0.2, experience, methods)
    assert wanted == "int8"
    assert "bf16" in experience
    experience.measured(1e8, "int8")
    assert "bf16" not in experience
    assert "int4" in experience


def test_one_in_use_is_forgotten_soon_though_it_was_on_trial_before() -> None:
    methods, experience = allowed(0.5), Experience()
    experience.measured(1e8, "exact")
    for _ in range(4):
        assert MethodTrial({"exact": 0.3}, PREDICTED).judged("bf16", 0.4, experience, methods)[0] != "bf16"
    MethodTrial({"bf16": 0.4}, PREDICTED).judged("int8", 0.2, experience, methods)
    assert "bf16" in experience
    experience.measured(1e8, "int8")
    assert "bf16" not in experience
