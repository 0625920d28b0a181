"""Tasks tried on fresh ranks: what became of it, and what is not called."""

from __future__ import annotations

import pytest

from phalanx import EMA, Callback, CannotHere, Freeze, WrongUse
from phalanx.launch.local import Failure
from phalanx.train.trying import Attempt, Tried
from phalanx.train.variant import variant
from tests.tasks import Digits


class Called(Digits):
    def callbacks(self) -> list[Callback]:
        return [EMA(), Freeze("0.*", until=2)]


def test_only_what_says_what_is_trained_is_called() -> None:
    task = variant(Called(), Tried, epochs=0.0, steps=3)
    assert [type(each) for each in task.callbacks()] == [Freeze]
    assert task.steps == 3


def test_what_failed_is_raised() -> None:
    assert Attempt("well").or_refuse() == "well"
    with pytest.raises(WrongUse, match=r"^mend it$"):
        Attempt(failure=Failure(1, 0.0, "mend it", code=2, final=True)).or_refuse()
    with pytest.raises(CannotHere, match="rank 1 raised\nline 3"):
        Attempt(failure=Failure(1, 0.0, "raised", trace="line 3")).or_refuse()
    with pytest.raises(CannotHere, match="Try phalanx tune batch"):
        Attempt(failure=Failure(0, 0.0, "OutOfMemoryError"), exhausted=True).or_refuse()
