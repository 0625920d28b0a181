"""Planted bugs are caught, and named for what they are. `benchmarks/bugs.py` tries all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.parallel.weights.holding import Holding
from phalanx.prove.bugs import known
from phalanx.prove.bugs.known import BUGS, find, planted
from phalanx.prove.proof import prove
from phalanx.references import find_task

SOME = [
    "norms_not_summed_over_tp", "accumulation_not_divided", "expert_gradients_doubled", "a_rank_is_killed",
    "moments_not_restored", "held_out_samples_repeated_to_fill_up", "gathered_samples_gradient_averaged",
]  # fmt: skip
MORE = [
    "sum_goes_to_a_copy", "clip_by_local_norm", "penalties_scaled_by_dp", "batch_norm_by_rank",
    "gathered_weights_outlive_update", "every_rank_reads_everything", "schedule_differs_by_rank",
    "tp_parts_in_an_order_of_their_own", "copy_not_awaited", "data_a_step_ahead_after_resuming", "loss_scale_forgotten",
    "row_bias_added_on_every_rank", "dropout_repeats_on_tp_ranks", "skip_decided_by_rank_0",
    "tp_parts_saved_in_each_others_place", "padding_counted_in_evaluation", "weights_in_use_not_refreshed",
    "measures_averaged_over_ranks", "rows_gathered_in_the_order_of_ranks", "recompute_drops_other_elements",
    "recomputed_batch_counted_again", "a_stage_computes_one_micro_batch_again", "short_batch_left_out_on_a_rank",
    "expert_shares_ignored", "loss_over_a_ranks_samples", "dropout_repeats_in_every_micro_batch",
]  # fmt: skip


@pytest.mark.parametrize("name", [*SOME, *(pytest.param(name, marks=pytest.mark.every) for name in MORE)])
def test_a_planted_bug_is_caught_and_named(name: str) -> None:
    bug = BUGS[name]
    proof = prove(find_task(bug.task)(**bug.settings), [bug.layout], inject=name, dtype=bug.dtype)
    assert proof.exit_code == 1
    finding = proof.results[0].finding
    assert finding is not None
    words = " ".join([f"{finding.rung}: {finding.name}", *finding.affected])
    assert any(word in words for word in bug.place.split("|")), finding
    assert bug.axis in finding.axes if bug.axis else not finding.axes
    if bug.factor is not None:
        assert finding.factor == pytest.approx(bug.factor)
    assert finding.cause
    assert str(finding)


@pytest.mark.parametrize(("name", "file"), [
    ("cp_attention_keeps_own_keys_gradient", "parallel/communication/differentiable.py"),
    ("cp_labels_roll_within_chunks", "phalanx/losses.py"),
])  # fmt: skip
def test_what_crosses_ranks_is_looked_for_where_it_does(name: str, file: str) -> None:
    bug = BUGS[name]
    finding = prove(find_task(bug.task)(**bug.settings), [bug.layout], inject=name).results[0].finding
    assert finding is not None
    assert file in finding.where, finding


def test_every_file_of_bugs_is_imported() -> None:
    folder = Path(known.__file__).parent
    own = {"__init__.py", "known.py", "planting.py", "seams.py", "tasks.py"}
    assert {Path(str(file.__file__)).name for file in known.FILES} == {p.name for p in folder.glob("*.py")} - own


def test_nothing_is_left_of_a_bug() -> None:
    before = Holding.counts
    with planted("norm_counts_replicas_twice"):
        assert Holding.counts is not before
    assert Holding.counts is before


def test_an_unknown_bug_is_refused_with_those_near() -> None:
    with pytest.raises(WrongUse, match="norms_not_summed_over_tp"):
        find("norms_not_sumed_over_tp")
