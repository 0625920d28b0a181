"""Whole proofs: right tasks pass, wrong ones are named, and what cannot be said is not."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers

import phalanx
from phalanx.prove.proof import prove
from phalanx.prove.results import EQUAL, NOT_APPLICABLE
from phalanx.recipes.gpt import GPT
from phalanx.recipes.shapes import Shapes
from tests.empty_weights import WithNothing
from tests.prove import tasks


def test_right_layouts_are_equal() -> None:
    proof = phalanx.prove(GPT(), ["dp=2", "fsdp=2,zero=1", "tp=2", "cp=2,pp=2", "dp=2,exact=8", "tp=8"])
    verdicts = {result.layout: result.verdict for result in proof.results}
    assert verdicts.pop("tp=8") == "not applicable"
    assert set(verdicts.values()) == {"equal"}
    assert proof.holds
    assert proof.exit_code == 0
    assert proof.bar <= 1e-9
    assert any("width" in note for note in proof.shrunk)


def test_experts_and_batch_norm_raise_no_alarm() -> None:
    assert prove(GPT(experts=4), ["fsdp=2,ep=2", "fsdp=2,cp=2,ep=4"]).holds
    assert prove(Shapes(), ["dp=2", "fsdp=3,zero=2", "dp=2,recompute=full"]).holds


@dataclass
class Bert(tasks.Plain):
    """A head whose bias has two names, looked up in both directions of a sequence."""

    def model(self) -> Any:
        sizes = {"hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2, "num_attention_heads": 4}
        return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=37, **sizes))

    def data(self) -> Any:
        draw = torch.Generator().manual_seed
        return [{"ids": torch.randint(0, 37, (9,), generator=draw(i))} for i in range(40)]

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"input_ids": batch["ids"], "attention_mask": (batch["ids"] != 3).long()}

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output.logits, batch["ids"], dim=-1)


def test_a_head_whose_bias_is_tied_can_be_cut() -> None:
    proof = prove(Bert(), ["fsdp=2,tp=2", "cp=2", "pp=2"])
    assert proof.holds, proof


def test_all_layouts_of_two_ranks() -> None:
    proof = prove(tasks.Plain(), "all", ranks=2)
    assert {result.layout for result in proof.results if result.verdict == "equal"} >= {"dp=2", "fsdp=2,zero=1"}
    assert all(result.reason for result in proof.results if result.verdict == "not applicable")
    assert proof.holds


def test_a_mean_for_a_sum_is_found_on_one_device() -> None:
    with pytest.raises(
        phalanx.WrongUse, match=r"is a mean and a count of 1 \(tests/prove/tasks.py:\d+: return phalanx"
    ):
        prove(tasks.Averaging(), ["dp=2"])
    proof = prove(tasks.Averaging(), ["dp=2"], check=False)
    assert proof.unchecked == "--unchecked"
    assert proof.exit_code == 1
    assert "depends on which samples are computed together" in proof.summary
    assert re.search(r"is a mean and a count of 1 \(tests/prove/tasks.py:\d+: return phalanx", proof.next)


def test_losses_that_compare_samples_are_proven_with_several_micro_batches() -> None:
    proof = prove(tasks.Contrastive(), ["dp=1", "dp=2", "fsdp=3,zero=2"], dtype="bf16")
    assert proof.holds, proof
    proof = prove(tasks.ContrastiveNorm(), ["dp=2", "dp=2,micro_batch=3", "micro_batch=5", "fsdp=2,zero=2"])
    assert proof.holds, proof
    assert prove(tasks.Several(), ["dp=2", "fsdp=2", "dp=2,fsdp=2"]).holds
    refused = prove(tasks.Contrastive(), ["exact=2", "dp=2"])
    assert refused.holds
    assert "leave exact out" in refused.results[0].reason


def test_whoever_counts_what_it_gathered_is_told_so() -> None:
    proof = prove(tasks.Contrastive(own=False), ["dp=2"])
    assert proof.exit_code == 1
    finding = proof.results[0].finding
    assert finding is not None
    assert "count the own (phalanx.rows)" in finding.cause
    assert "tasks.py" in finding.where


def test_a_task_that_does_not_repeat_is_found_first() -> None:
    with pytest.raises(phalanx.WrongUse, match=r"not deterministic.*tasks.py:\d+: return x \* \(1"):
        prove(tasks.Undecided(), ["dp=2"])
    proof = prove(tasks.Undecided(), ["dp=2"], check=False)
    assert proof.exit_code == 1
    assert "not deterministic" in proof.summary
    assert re.search(r"tasks.py:\d+: return x \* \(1", proof.next)


@pytest.mark.parametrize(
    ("task", "words"),
    [(tasks.Counts(), "not deterministic"), (tasks.Mixes(), "mixes samples.*Centred")],
    ids=["counts", "mixes"],
)
def test_a_model_that_is_no_function_of_a_sample_is_named(task: phalanx.Task, words: str) -> None:
    with pytest.raises(phalanx.WrongUse, match=rf"{words}.*tests/prove/tasks.py:\d+: return x"):
        prove(task, ["dp=2"])
    proof = prove(task, ["dp=2"], check=False)
    assert proof.exit_code == 1
    assert re.search(rf"{words}.*tests/prove/tasks.py:\d+: return x", proof.next)


@dataclass
class Matrices(GPT):
    """Optimizers of whole matrices: of hidden ones, and of all others.

    A small eps divides what is nearly nothing by what is nearly nothing, and one rounding would be seen in all weights.
    """

    def optimizer(self, params: Any) -> Any:
        hidden = [p for p in params if p.ndim == 2 and p.logical_name.startswith("blocks")]
        rest = [p for p in params if not any(p is other for other in hidden)]
        return {"hidden": phalanx.optim.SOAP(hidden, every=2, eps=1e-4), "rest": torch.optim.Adafactor(rest)}


def test_optimizers_of_whole_matrices_are_proven() -> None:
    proof = prove(Matrices(), ["dp=2", "fsdp=2", "fsdp=2,tp=2", "pp=2,cp=2", "dp=2,exact=4"])
    assert {result.verdict for result in proof.results} == {"equal"}, proof
    assert proof.bar <= 1e-9


class Signed(torch.optim.SGD):
    """Steps by the gradient over its largest element, which rows of it need not have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            if weight.grad is not None and weight.grad.numel():
                weight.sub_(1e-2 * weight.grad / weight.grad.abs().max())


@dataclass
class Claiming(tasks.Plain):
    """Has pieces updated that must be whole: it is an SGD, which updates each element by itself."""

    def optimizer(self, params: Any) -> Any:
        return Signed(params, lr=1e-2)


def test_a_piece_updated_where_the_whole_is_needed_is_found() -> None:
    proof = prove(Claiming(), ["dp=2", "fsdp=2"])
    assert [result.verdict for result in proof.results] == ["equal", "differs"], proof
    finding = proof.results[1].finding
    assert finding is not None
    assert (finding.rung, finding.axes) == ("weights", ["fsdp"])


def test_weights_in_no_group_of_the_optimizer_stay_as_they_are() -> None:
    proof = prove(tasks.MatricesAlone(), ["dp=1", "dp=2", "fsdp=2"])
    assert proof.holds, proof


class Quits(phalanx.Callback):
    """Wants to stop after the first step, and averages what it is told."""

    mean = 0.0

    def on_step(self, engine: phalanx.Engine, metrics: Any) -> None:
        self.mean += 0.0 if metrics.skipped else 0.5 * (metrics.loss - self.mean)
        engine.stop("enough")

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Forgets(Quits):
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Loses(phalanx.EMA):
    """What is restored goes nowhere."""

    def tensors(self) -> dict[str, Any]:
        return dict(self.averages)


class Partial(phalanx.Callback):
    """Another rank trains what one device does not."""

    def trains(self, step: int, weight: str) -> bool:
        return weight != "blocks.1.feed_forward.up_proj.weight" or os.environ.get("RANK") == "1"


@dataclass
class Called(GPT):
    last: str = "Quits"

    def callbacks(self) -> list[phalanx.Callback]:
        last = {"Quits": Quits, "Forgets": Forgets, "Partial": Partial, "Loses": Loses}[self.last]
        freezes = [phalanx.Freeze("blocks.0.*", until=2), phalanx.Freeze("*norm*", since=3)]
        return [*freezes, phalanx.EMA(0.9, evaluate=True), phalanx.EarlyStopping(patience=1), last()]


def test_tasks_with_callbacks_are_proven() -> None:
    proof = prove(Called(), ["dp=2", "fsdp=2", "tp=2", "pp=2"])
    assert proof.holds, proof


def test_callbacks_that_differ_between_ranks_or_forget_are_found() -> None:
    assert "blocks.1.feed_forward.up_proj.weight" in str(prove(Called(last="Partial"), ["dp=2"]))
    assert "callbacks' state was not restored" in str(prove(Called(last="Forgets"), ["dp=2"]))
    assert "Loses of embedding.weight was not restored" in str(prove(Called(last="Loses"), ["dp=2"]))


def test_what_makes_much_of_rounding_cannot_be_certified() -> None:
    proof = prove(tasks.Sensitive(), ["dp=2"])
    assert not proof.holds
    assert proof.exit_code == 3
    assert "cannot certify" in proof.summary


def test_a_model_that_looks_at_its_rank_is_found() -> None:
    finding = prove(tasks.LooksAtRank(), ["dp=2"]).results[0].finding
    assert finding is not None
    assert (finding.rung, finding.name, finding.axes, finding.ranks) == ("activations", "1", ["dp"], [1])
    assert finding.factor == pytest.approx(1.01)
    assert "tasks.py" in finding.where


def test_data_that_looks_at_its_rank_is_found() -> None:
    proof = prove(tasks.RankInData(), ["dp=2"])
    assert proof.exit_code == 1
    assert "rank" in str(proof)


@pytest.mark.parametrize("task", [tasks.Odd(), tasks.Tabular(), tasks.Normed()], ids=lambda task: type(task).__name__)
def test_odd_tasks_raise_no_alarm(task: phalanx.Task) -> None:
    proof = prove(task, ["dp=2", "fsdp=2,zero=1", "fsdp=3"])
    assert proof.holds, proof
    assert proof.bar < 1e-10


def test_a_task_that_fails_on_one_device_is_told_so() -> None:
    proof = prove(tasks.Broken(), ["dp=2"])
    assert proof.exit_code == 2
    assert "fails on one device" in proof.summary
    assert "tasks.py" in proof.summary


def test_casts_to_float32_do_not_stand_in_the_way() -> None:
    assert prove(tasks.Narrow(), ["dp=2", "fsdp=2"]).holds


def test_a_narrow_dtype_is_proven_beside_float64() -> None:
    assert prove(GPT(), ["fsdp=2", "tp=2"], dtype="bf16").holds


def test_a_layout_that_a_narrow_dtype_cannot_is_not_called_equal() -> None:
    proof = prove(GPT(), ["fsdp=2", "pp=2,schedule=zb"], dtype="fp8")
    assert [result.verdict for result in proof.results] == [EQUAL, NOT_APPLICABLE]
    assert "schedule=zb leaves gradients" in proof.results[1].reason


def test_wrong_numbers_are_refused() -> None:
    for options, words in (
        ({"steps": 0}, "--steps 0"),
        ({"ranks": 0}, "--ranks 0"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"inject": "nothing"}, "'nothing' is not a bug"),
    ):
        with pytest.raises(phalanx.WrongUse, match=words):
            prove(tasks.Plain(), ["dp=2"], **options)  # type: ignore[arg-type]
    with pytest.raises(phalanx.WrongUse, match="no layout"):
        prove(tasks.Plain(), [])
    assert prove(tasks.Plain(global_batch=1), ["dp=2"]).exit_code == 2


@dataclass
class Beside(tasks.Plain):
    """Updates a model of its own."""

    def optimizer(self, params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model().parameters())


def test_an_optimizer_of_another_models_tensors_is_refused() -> None:
    with pytest.raises(phalanx.WrongUse, match="tensors that are not those it was given"):
        prove(Beside(), ["dp=2"])


def test_a_weight_without_elements_is_no_finding() -> None:
    assert prove(WithNothing(), ["dp=2", "fsdp=2"]).holds
