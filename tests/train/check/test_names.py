"""Names that a task has and nobody asks for. Some that are found are in `tests.mistakes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx import WrongUse, user_code
from phalanx.references import find_task
from phalanx.train.check.names import check_names

TASK = """
from dataclasses import dataclass, field
import phalanx

@dataclass
class T(phalanx.Task):
{body}
"""


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """What is said of a task in a file of its own, the only one that its user has."""

    def said(body: str) -> list[str]:
        file = tmp_path / "mine.py"
        file.write_text(TASK.replace("{body}", body))
        monkeypatch.setattr(user_code, "modules", lambda: {"mine": file})
        return check_names(find_task(str(file))())

    return said


def test_what_settings_are_called_elsewhere_is_told(names: Callable[[str], list[str]]) -> None:
    found = names("    lr: float = 1.0\n    batch_size: int = 3\n    globl_batch: int = 4\n    deep: int = 2\n")
    assert [line.partition(" is a setting")[0] for line in found] == ["lr", "batch_size", "globl_batch", "deep"]
    assert [line.rpartition("): ")[2] for line in found] == [
        "learning_rate is what a task has.", "global_batch is what a task has.", "global_batch is what a task has.",
        found[-1],
    ]  # fmt: skip


def test_drop_last_is_answered_with_last_batch(names: Callable[[str], list[str]]) -> None:
    (found,) = names("    drop_last: bool = True\n")
    assert found.startswith("drop_last is a setting of T that nothing reads")
    assert found.endswith("last_batch is what a task has.")


def test_what_is_read_is_not_told(names: Callable[[str], list[str]]) -> None:
    assert names("    own: int = 1\n    def model(self): return self.own\n    def help(self): return 1\n") == []
    assert names("    own: int = 1\n    def model(self): return getattr(self, 'own')\n") == []
    assert names("    own: int = 1\n    def model(self): return str(vars(self))\n") == []
    assert (
        names("    pass\n\nfrom phalanx.recipes.gpt import GPT\n@dataclass\nclass T(GPT):\n    width: int = 64\n") == []
    )


@dataclass
class Fine(find_task("gpt")):  # type: ignore[misc]
    width: int = 64


class Plain(Fine):
    width = 48


class Unannotated(Fine):
    global_batch = 12


@dataclass
class Computed(Fine):
    @property
    def steps(self) -> int:  # type: ignore[override]
        return 7

    @steps.setter
    def steps(self, value: Any) -> None:
        pass


def test_a_default_that_is_not_taken_is_refused() -> None:
    Fine().check()
    replace(Fine(), width=8).check()
    replace(Fine(), learning_rate=np.float32(0.1)).check()
    Computed().check()
    with pytest.raises(WrongUse, match=r"width = 48 in Plain is not taken: 64 is. Put @dataclass above the class"):
        Plain().check()
    with pytest.raises(WrongUse, match=r"write it with its type: global_batch: int = 12"):
        Unannotated().check()


@pytest.mark.parametrize("value", ["1e-3", None, True, [0.1]])
def test_a_number_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(WrongUse, match=r"learning_rate=.* is a .*, not a number"):
        replace(Fine(), learning_rate=value).check()
