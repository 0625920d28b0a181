"""What a checkpoint says of its run: each fact is checked before anything uses it, and none ends in a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phalanx import Engine
from phalanx.checkpoint.facts import FACTS, OPTIONAL, checked_facts, is_layout, missing_fact
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.verify import verify
from phalanx.errors import CannotHere
from phalanx.run import Run
from phalanx.train.evaluating import Evaluator
from phalanx.train.restoring import Restorer
from tests.checkpoints import manager_at, rewritten, trained
from tests.tasks import Digits

WRONG: dict[str, list[Any]] = {
    "step": [-1, 1.5, True, None, "12", [12], 1 << 70],
    "samples": [-1, "8", None],
    "terms": ["8", None, [8]],
    "scale": [[], [1.0], [1.0, 0], ["1", 0, True], [1.0, -1, True], [1.0, 0, 1], {}],
    "guard": [
        {}, [], {"losses": [], "bad_in_a_row": 0}, {"losses": ["1"], "bad_in_a_row": 0, "left_out": []},
        {"losses": [], "bad_in_a_row": 0, "left_out": [-1]}, {"losses": 3, "bad_in_a_row": 0, "left_out": []},
    ],
    "seed": ["7", 7.0, None],
    "global_batch": [0, -8, 8.0, "8"],
    "data": [-1, None, "8"],
    "layout": [7, "", "dp=0", "dp=2,dp=3", "nothing=3", None],
    "world": [-5, 0, 1 << 40, "2", 2.0, [1]],
    "generation": [-1, "1", None],
    "options": [[], {"0.weight": 3}, {"0.weight": {"betas": {"a": 1}}}],
    "attributes": [[], {"__class__": 1}, {"soap.__dict__": 1}, {"a": {"b": 1}}],
    "tied": [[], {"a": 1}, "a"],
    "compared": [-1, "3"],
    "code": [3, None],
    "rank": [-1, "0"],
    "good": [-2, "1"],
    "fp8": [3, {"steps": -1}, {"linears": {"a": [1.0]}}, {"linears": [1]}],
    "fingerprint": [{"size": 3}, {"size": 3, "samples": {"a": "b"}, "repeatable": True}, 7],
    "versions": [[], {"torch": 2}],
    "callbacks": [[1], "EMA"],
    "ended": [{"step": 3}, {"step": 3, "of": "4", "why": ""}, {"step": 3, "of": 4, "why": "", "more": 1}],
    "outer": [[1.0], ["1", "2"], 3],
    "frozen": [{"from": "x"}, {"from": 1, "hash": "x"}, {"from": "x", "hash": "y", "tensors": {"a": ["float32"]}}],
    "owed_missing": [1, "yes"],
}  # fmt: skip


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Those of a run."""
    folder = tmp_path_factory.mktemp("run")
    trained(Digits(), "dp=1", folder, None, 1)
    return manager_at(folder).open(1).manifest.facts


def test_what_a_run_says_is_right(facts: dict[str, Any]) -> None:
    assert checked_facts(facts) == facts
    assert not missing_fact(facts)
    assert facts.keys() <= FACTS.keys() | OPTIONAL.keys(), "a fact that nobody checks"
    assert missing_fact({"step": 3}) == "attributes"


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused_in_one_line(name: str, facts: dict[str, Any]) -> None:
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=rf"^{name} is .*$"):
            checked_facts({**facts, name: value})


def test_what_are_no_facts() -> None:
    with pytest.raises(ValueError, match=r"its facts are '\[1\]'"):
        checked_facts([1])
    with pytest.raises(ValueError, match="it has no step"):
        checked_facts({})


def test_layouts_are_texts_of_layouts() -> None:
    assert is_layout("dp=2,fsdp=4")
    assert not any(map(is_layout, ("fsdp=-1", "x", 3, None, ["dp=1"])))


@pytest.mark.parametrize(("name", "value"), [("world", -5), ("guard", []), ("scale", {}), ("layout", "dp=-2")])
def test_a_wrong_fact_is_damage_to_all_who_read_it(
    name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run goes on from the checkpoint before."""
    run = Run(tmp_path)
    trained(Digits(), "dp=1", run.checkpoints_path, None, 1)
    trained(Digits(), "dp=1", run.checkpoints_path, run.checkpoints_path, 1)
    step = run.checkpoints_path / "step-00000002"
    for file in ("manifest.json", "part-00000.json"):
        rewritten(step / file, lambda found: found["facts"].update({name: value}))
    told = f"describes no checkpoint: {name} is"
    assert told in str(verify(str(tmp_path)))
    with pytest.raises(Damaged, match=told):
        manager_at(run.checkpoints_path).open(2)
    with Engine(Digits(), device="cpu") as engine:
        assert Restorer(engine, manager_at(run.checkpoints_path)).restore() == str(step.with_name("step-00000001"))
    assert told in capsys.readouterr().out


def test_facts_that_are_missing_are_told(tmp_path: Path) -> None:
    run = Run(tmp_path)
    trained(Digits(), "dp=1", run.checkpoints_path, None, 1)
    rewritten(run.checkpoints_path / "step-00000001" / "manifest.json", lambda found: found.update(facts={"step": 1}))
    told = "describes no checkpoint of a run: it has no attributes"
    assert told in str(verify(str(tmp_path)))
    with Engine(Digits(), device="cpu") as engine, pytest.raises(CannotHere, match=told):
        Restorer(engine, manager_at(run.checkpoints_path)).restore()
    run.write_settings({"run": {"task": f"{Path(__file__).parents[1] / 'tasks.py'}:Digits"}})
    with pytest.raises(CannotHere, match=told):
        Evaluator.of(tmp_path).evaluate(1)
