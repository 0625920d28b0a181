"""An error of the prover itself is told as ours, with what to report; one of the task's is not."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import transformers

import phalanx
from phalanx import configs
from phalanx.prove.ladder import Standard
from phalanx.prove.layouts import covering
from phalanx.prove.own_faults import is_own
from phalanx.prove.proof import prove
from phalanx.prove.reference import loop
from phalanx.prove.results import UNKNOWN
from tests.prove.tasks import Plain

OURS = "this is a bug in phalanx prove, not in your task"


def trace_of(call: Any) -> str:
    try:
        call()
    except Exception:
        return traceback.format_exc()
    raise AssertionError("nothing was raised")


def test_who_raised_an_error_is_read_off_its_traceback() -> None:
    nothing: Any = None
    assert is_own(trace_of(lambda: covering(nothing)))
    assert not is_own(trace_of(lambda: torch.nn.Linear(2, 3)(torch.ones(4))))
    assert not is_own(trace_of(lambda: nothing.missing))
    assert not is_own("")


@dataclass
class Large(Plain):
    """Of Hugging Face's, and too large to be proven as it is."""

    def model(self) -> Any:
        sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=999, **sizes))

    def data(self) -> Any:
        return [{"ids": torch.arange(i, i + 9)} for i in range(40)]

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"input_ids": batch["ids"]}

    def loss(self, output: Any, batch: dict[str, Any]) -> phalanx.Loss:
        return phalanx.losses.cross_entropy(output.logits, batch["ids"], dim=-1)


def test_a_task_that_cannot_be_made_small_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "vocabulary", None)
    proof = prove(Large(), ["dp=2"], check=False)
    assert proof.exit_code == 3
    assert proof.summary.startswith(f"{OURS}: making the task small failed with TypeError")
    assert "shrink.py" in proof.evidence[0]
    assert f"phalanx {phalanx.__version__}, torch {torch.__version__}" in proof.evidence[0]
    assert "Please report it" in proof.next
    assert "tiny()" in proof.next


def test_an_error_of_the_reference_itself_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "NONE", None)
    proof = prove(Plain(), ["dp=2"], check=False)
    assert proof.exit_code == 3
    assert proof.summary.startswith(f"{OURS}: the run on one device failed with")
    assert "phalanx train says the same" not in str(proof)


def test_an_error_of_the_prover_on_a_rank_says_nothing_of_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> Standard:
        return replace(measured(*given), noise=None)  # type: ignore[arg-type]

    measured = Standard.measured
    monkeypatch.setattr(Standard, "measured", broken)
    proof = prove(Plain(), ["dp=2"], check=False)
    assert proof.exit_code == 3
    assert proof.summary == f"nothing can be said of 1 of 1 layouts of Plain: {OURS}"
    assert [result.verdict for result in proof.results] == [UNKNOWN]
    assert proof.results[0].reason.startswith(f"{OURS}: a rank failed with TypeError")
    assert "ladder.py" in proof.evidence[0]


def test_a_planted_bug_is_none_of_the_provers() -> None:
    finding = prove(Plain(), ["dp=2"], inject="memory_runs_out_on_one_rank").results[0].finding
    assert finding is not None
    assert "MemoryError" in finding.name
