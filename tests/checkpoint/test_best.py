"""Which checkpoint is the best: noted, kept beside the last ones, and nothing where it is gone or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.checkpoint.best import BEST, Best, read_best, write_best
from phalanx.checkpoint.manifest import Damaged
from phalanx.checkpoint.store import open_store
from tests.checkpoints import manager_at, trained
from tests.tasks import Digits


def test_what_is_noted_is_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert read_best(store) is None
    for best in (Best(4, "dice", 0.5), Best(6, "dice", 0.75)):
        write_best(store, best)
        assert read_best(store) == best
    assert str(best) == "step 6, with the best dice, 0.75"


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"step": 4}', '{"step": -1, "measure": "a", "value": 1}', '{"step": 2, "measure": "a", "value": NaN}'],
)
def test_what_names_no_checkpoint_is_damage(tmp_path: Path, text: str) -> None:
    (tmp_path / BEST).write_text(text)
    with pytest.raises(Damaged, match="does not name a checkpoint"):
        read_best(open_store(tmp_path))
    assert manager_at(tmp_path).best() is None


def test_the_best_is_kept_until_another_is_better(tmp_path: Path) -> None:
    manager = manager_at(tmp_path)
    for steps in (1, 2, 3, 4):
        trained(Digits(), "dp=1", tmp_path, tmp_path if steps > 1 else None, steps=1)
        if steps == 2:
            manager.note_best(Best(2, "accuracy", 0.5))
    assert manager.steps() == [2, 3, 4], "the last two, and the best"
    assert manager.retain(4, last=1, every=0) == [3]
    assert manager.steps() == [2, 4]
    assert manager.best() == Best(2, "accuracy", 0.5)
    manager.note_best(Best(4, "accuracy", 0.6))
    assert manager.retain(4, last=1, every=0) == [2]
    manager.note_best(Best(9, "accuracy", 0.6))
    assert manager.best() is None, "it is not there"
