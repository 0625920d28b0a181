"""Tasks tried on fresh ranks: what became of it, and what is not called."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from phalanx import EMA, Callback, CannotHere, Freeze, WrongUse
from phalanx.launch.local import Failure
from phalanx.layout import Layout
from phalanx.train.beforehand import FILE
from phalanx.train.engine import Engine
from phalanx.train.trying import Attempt, Tried, _on_rank
from phalanx.train.variant import variant
from tests.tasks import Digits
from tests.train.test_beforehand import FromWhereItBegan


class Called(Digits):
    def callbacks(self) -> list[Callback]:
        return [EMA(), Freeze("0.*", until=2)]


def test_only_what_says_what_is_trained_is_called() -> None:
    task = variant(Called(), Tried, epochs=0.0, steps=3)
    assert [type(each) for each in task.callbacks()] == [Freeze]
    assert task.steps == 3


def began(engine: Engine) -> float:
    """What is known of the first sample before the first step."""
    return float(engine.loader.reader.data[0]["square"])


def test_what_is_known_beforehand_is_computed_once_for_all_attempts(tmp_path: Path) -> None:
    (tmp_path / "known").mkdir()
    task = variant(FromWhereItBegan(), Tried, epochs=0.0, steps=3)
    arguments = task, Layout(), "cpu", tmp_path, tmp_path / "known", began
    first = _on_rank(*arguments)
    with safe_open(tmp_path / "known" / FILE, "pt") as file:
        said, found = file.metadata(), {name: file.get_tensor(name) + 1 for name in file.keys()}  # noqa: SIM118
    save_file(found, tmp_path / "known" / FILE, said)
    assert _on_rank(*arguments) == pytest.approx(first + 1)


def test_what_failed_is_raised() -> None:
    assert Attempt("well").or_refuse() == "well"
    with pytest.raises(WrongUse, match=r"^mend it$"):
        Attempt(failure=Failure(1, 0.0, "mend it", code=2, final=True)).or_refuse()
    with pytest.raises(CannotHere, match="rank 1 raised\nline 3"):
        Attempt(failure=Failure(1, 0.0, "raised", trace="line 3")).or_refuse()
    with pytest.raises(CannotHere, match="Try phalanx tune batch"):
        Attempt(failure=Failure(0, 0.0, "OutOfMemoryError"), exhausted=True).or_refuse()
