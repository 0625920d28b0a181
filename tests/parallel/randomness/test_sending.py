"""What draws are keyed by: sent once, or anew each time that a graph reads it."""

from __future__ import annotations

import numpy as np
import torch

from phalanx.parallel.randomness.draws import Moment, Randomness
from phalanx.parallel.randomness.sending import Resent, Sender

CPU = torch.device("cpu")


def test_sent_as_it_is() -> None:
    assert torch.equal(Sender(CPU)(lambda: torch.arange(3), np.zeros(1)), torch.arange(3))


def test_what_a_graph_reads_is_renewed_for_its_own_micro_batch() -> None:
    sender, first, second, step = Sender(CPU), np.arange(2), np.arange(2), 5
    sender.recorded = resent = Resent(CPU)
    places = [sender(lambda: torch.tensor([step, 1]), first), sender(lambda: torch.tensor([step, 2]), second)]
    step = 6
    resent.renew(second)
    # on a processor nothing is copied: what was given is what a graph would read
    assert [place.tolist() for place in places] == [[5, 1], [6, 2]]


def test_keys_are_those_of_the_moment_that_they_are_renewed_in() -> None:
    """Of a block, whose keys are made together with all blocks', and of any other scope."""
    for scope in ("block", "task"):
        moment = Moment(step=3, slots=np.array([4, 7]))
        draws = Randomness(0, moment, CPU)
        draws.expect(["block"])

        def drawn(draws: Randomness = draws, scope: str = scope) -> list[torch.Tensor]:
            with draws.scope(scope):
                return [draws._slots_there().clone() if scope == "task" else draws.keys()[1].clone()]

        expected = {}
        for step, slots in ((3, [4, 7]), (9, [5, 6])):
            moment.step, moment.slots = step, np.array(slots)
            expected[step] = drawn()[0]
        moment.step, moment.slots = 3, np.array([4, 7])
        draws.forget()
        own, resent = moment.slots, Resent(CPU)
        draws.sender.recorded = resent
        with draws.scope(scope):
            place = draws._slots_there() if scope == "task" else draws.keys()[1]
        draws.sender.recorded = None
        assert torch.equal(place, expected[3])
        moment.step, moment.slots = 9, np.array([5, 6])
        resent.renew(own)
        assert torch.equal(place, expected[9])
