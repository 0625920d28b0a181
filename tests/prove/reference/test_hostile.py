"""A task under trial is its own task, and awkward."""

from __future__ import annotations

import numpy as np
import torch

from phalanx import ParameterGroup
from phalanx.data.by_length import ByLength, LengthOrder
from phalanx.kernels.linear_cross_entropy import LOGIT_ELEMENTS
from phalanx.prove.cases import Docket
from phalanx.prove.reference.hostile import Trial, TrialSamples, cramped, hostile, ignorable
from phalanx.prove.reference.loop import Reference
from phalanx.recipes.gpt import GPT
from phalanx.train.shrink import Needs
from tests.prove.tasks import Plain


def test_it_stays_an_instance_of_its_class_and_leaves_the_users_alone() -> None:
    plain = Plain()
    task = hostile(plain, Trial(3))
    assert isinstance(task, Plain)
    assert type(task).__name__ == "Plain"
    assert (task.precision, task.steps, task.global_batch) == ("float64", 4, 17)
    assert (plain.precision, plain.global_batch) == ("fp32", 16)
    weight = task.model()[0].bias  # type: ignore[index]
    assert float(weight.detach().abs().min()) > 0


def test_samples_note_what_is_read_and_drawn() -> None:
    samples = TrialSamples(Plain().data(), Trial(3, ignorable=("y",)), 29)
    torch.manual_seed(0)
    np.random.seed(0)
    assert [int(samples[i]["y"]) for i in (3, 4)] == [-100, samples.places[4] % 3]
    (_, once), (_, again) = samples.read[0], (samples[3], samples.read[-1])[1]
    assert once != again  # other draws


def test_sequences_are_cut_and_ids_folded() -> None:
    data = [{"tokens": torch.arange(50)}]
    sample = TrialSamples(data, Trial(3, length=8, vocabulary=5), 29)[0]
    assert sample["tokens"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]


def test_tokens_that_mean_something_stay_where_they_are() -> None:
    """A picture's place must not become a word, nor a word a picture's place."""
    tokens = torch.tensor([90, 90, 1, *range(2, 80), -100])
    special = {90: 6, 1: 1}
    for spread in ({}, {"tokens": 7}):
        trial = Trial(3, vocabulary=7, special=special, spread=spread)
        found = TrialSamples([{"tokens": tokens}], trial, 29)[0]["tokens"]
        assert found[[0, 1, 2, -1]].tolist() == [6, 6, 1, -100]
        assert {*found[3:-1].tolist()} == {0, 2, 3, 4, 5}, "all words, and words alone"


def test_the_last_step_has_a_loss_that_is_no_number() -> None:
    task = hostile(Plain(), Trial(2))
    task.data()
    moment = task.proof_trial.moment  # type: ignore[attr-defined]
    batch = {"y": torch.zeros(2, dtype=torch.int64)}
    moment.step, moment.slots = 1, np.array([11])
    assert bool(torch.isfinite(task.loss(torch.zeros(2, 3), batch).total))
    moment.step, moment.slots = 2, np.array([16])
    assert bool(torch.isnan(task.loss(torch.zeros(2, 3), batch).total))


def test_columns_that_may_be_ignored_are_found() -> None:
    task, model = Plain(), Plain().model()
    batch = {"x": torch.randn(4, 6), "y": torch.tensor([0, 1, 2, 0]), "number": torch.arange(4)}
    assert ignorable(task, batch, model(batch["x"])) == ("y",)


def test_little_is_enough_while_it_is_cramped() -> None:
    from phalanx.kernels import linear_cross_entropy

    with cramped():
        assert linear_cross_entropy.LOGIT_ELEMENTS < LOGIT_ELEMENTS
    assert linear_cross_entropy.LOGIT_ELEMENTS == LOGIT_ELEMENTS
    assert GPT().tiny().width < GPT().width


def test_weights_that_begin_frozen_are_trained_in_a_proof() -> None:
    docket = Docket(Plain(parameters={"0.*": ParameterGroup(frozen_steps=1000)}), 3, 2)
    task, reference = docket._prepared(Needs())
    assert task.parameters["0.*"].frozen_steps == 1
    moved = [step.gradients["0.weight"] is not None for step in reference.steps if not step.skipped]
    assert moved[:2] == [False, True]
    assert "weights that begin frozen are so in the first step alone" in docket.hostility


def test_steps_by_length_stay_so_and_differ_in_size() -> None:
    class Ragged(Plain):
        def data(self) -> ByLength:
            found = super().data()
            return ByLength(found, [1 + index % 13 for index in range(len(found))], batch_tokens=10**6)

    task = hostile(Ragged(), Trial(3, length=9))
    order = task.proof_order  # type: ignore[attr-defined]
    assert isinstance(order, LengthOrder)
    assert int(order.lengths.max()) == 9
    assert len({order.slots(step) for step in range(order.steps_in(2))}) > 1
    assert order.steps_per_epoch > 1, "what is enough for all samples of the task is too much for a trial"
    assert Reference(task).run(2).steps[0].ids.tolist() == order.ids(0).tolist()
