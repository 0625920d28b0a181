"""What ranks tell of a run, through a pipe to their supervisor."""

from __future__ import annotations

import pickle

from phalanx.train.calling import Ended
from phalanx.train.summary import Summary


def test_it_travels_as_it_is() -> None:
    told = Summary(7, stopped=True, held_out={"loss": 0.5}, held_out_with="Average", ended=Ended(7, 9, "enough"))
    assert pickle.loads(pickle.dumps(told)) == told
    assert Summary() == Summary(steps=0, stopped=False, held_out={}, held_out_with="", ended=None)
