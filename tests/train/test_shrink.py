"""Large tasks are made small, and keep what layouts need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import phalanx
from phalanx import CannotHere, Layout, WrongUse
from phalanx.prove import cases
from phalanx.prove.cases import Docket
from phalanx.prove.proof import prove
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.recipes.gpt import GPT
from phalanx.train.shrink import Needs, shrunk
from tests.families import IMAGE, FamilyTask
from tests.prove.tasks import Plain


def test_a_small_task_is_left_as_it_is() -> None:
    task = Plain()
    assert shrunk(task, Needs()).task is task


def test_blocks_are_as_many_as_layouts_need_and_the_task_has() -> None:
    needs = Needs.of([Layout(pp=2, schedule="interleaved"), Layout(tp=2, cp=4)])
    assert (needs.blocks, needs.heads) == (4, 8)
    assert shrunk(GPT(layers=12), needs).task.layers == 4  # type: ignore[attr-defined]
    assert shrunk(GPT(layers=3), needs).task.layers == 3  # type: ignore[attr-defined]


@dataclass
class Wide(Plain):
    width: int = 500_000


def test_what_cannot_be_made_small_is_refused_with_advice() -> None:
    with pytest.raises(WrongUse, match=r"tiny\(\)"):
        shrunk(Wide(), Needs())


class Texts:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens = torch.randint(0, 5000, (96,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens.roll(-1)}


@dataclass
class Llama(Plain):
    """A Hugging Face model too large to prove, with no `tiny`."""

    def model(self) -> nn.Module:
        sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8}
        config = transformers.LlamaConfig(vocab_size=5000, num_key_value_heads=4, **sizes)
        return transformers.LlamaForCausalLM(config)

    def data(self) -> Any:
        return Texts()

    def inputs(self, batch: dict[str, Any]) -> Any:
        return {"input_ids": batch["input_ids"]}

    def loss(self, output: Any, batch: dict[str, Any]) -> Any:
        return phalanx.losses.cross_entropy(output.logits, batch["labels"], dim=-1)


@dataclass
class StateSpace(Llama):
    hidden: int = 1024

    def model(self) -> nn.Module:
        heads = {"num_heads": self.hidden // 32, "head_dim": 64, "n_groups": 1, "state_size": 16}
        return transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(hidden_size=self.hidden, num_hidden_layers=2, vocab_size=61, **heads)
        )


@dataclass
class Composite(Llama):
    """Models whose configurations are of several parts, or work some of their settings out of others."""

    kind: str = "CLIPConfig"

    def model(self) -> nn.Module:
        names = {"CLIPConfig": "CLIPModel", "JambaConfig": "JambaForCausalLM", "Gemma4TextConfig": "Gemma4ForCausalLM"}
        sizes: dict[str, Any] = {
            "CLIPConfig": {},
            "JambaConfig": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_experts": 4},
            "Gemma4TextConfig": {"vocab_size": 5000, "num_hidden_layers": 6, "vocab_size_per_layer_input": 5000},
        }[self.kind]
        return getattr(transformers, names[self.kind])(getattr(transformers, self.kind)(**sizes))


@pytest.mark.parametrize("kind", ["CLIPConfig", "JambaConfig", "Gemma4TextConfig"])
def test_configurations_of_other_kinds_are_made_smaller(kind: str) -> None:
    small = shrunk(Composite(kind=kind), Needs())
    assert small.by_config
    assert small.vocabulary == 131
    assert sum(weight.numel() for weight in small.task.model().parameters()) < 1_000_000


def test_special_tokens_are_known_of_small_models_too() -> None:
    small = shrunk(FamilyTask(kind="qwen2-vl"), Needs())
    assert not small.by_config
    assert (small.special[IMAGE], small.special[0]) == (IMAGE, 0)
    large = shrunk(Llama(), Needs())
    assert large.special == {1: 1, 2: 2}


class Unbuilt(transformers.LlamaForCausalLM):
    """Whose heads must not be as narrow as the first way makes them."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        if config.head_dim < 16:
            raise ValueError("heads are too narrow")
        super().__init__(config)


class Unrun(transformers.LlamaForCausalLM):
    """The same, and it is found out where it computes."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.config.head_dim < 16:
            raise ValueError("heads are too narrow")
        return super().forward(*args, **kwargs)


class Unfit(Unbuilt):
    """Which is never small enough."""

    def __init__(self, config: transformers.LlamaConfig) -> None:
        if config.vocab_size < 5000:
            raise ValueError("there are too few words")
        super().__init__(config)


@dataclass
class Particular(Llama):
    kind: type[nn.Module] = Unbuilt

    def model(self) -> nn.Module:
        return self.kind(super().model().config)


@pytest.mark.parametrize("kind", [Unbuilt, Unrun])
def test_where_one_way_does_not_work_another_is_tried(kind: type[nn.Module]) -> None:
    docket = Docket(Particular(kind=kind), 1, 1)
    case = docket.cases[docket.number(Layout())]
    assert case.task.model().config.head_dim == 16
    assert not any("narrow" in note for note in docket.notes)


def test_a_model_that_no_way_fits_is_refused_and_not_blamed() -> None:
    with pytest.raises(CannotHere, match=r"Phalanx could not make .* smaller: .*too few words.*The task itself may be"):
        Docket(Particular(kind=Unfit), 1, 1).number(Layout())


def test_a_state_space_model_is_shrunk_and_not_padded_to_long_chunks() -> None:
    large, small = shrunk(StateSpace(), Needs()), shrunk(StateSpace(hidden=32), Needs())
    assert "chunk_size 256 -> 8" in large.notes
    assert "chunk_size 256 -> 8" in small.notes
    assert large.task.model().config.hidden_size == small.task.model().config.hidden_size == 32


def test_a_slow_step_is_made_shorter_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "SLOW_SECONDS", 0.0)
    told: list[str] = []
    docket = Docket(Llama(), 1, 1, told.append)
    docket.number(Layout())
    assert any("length -> 6, since a step took" in note for note in docket.notes)
    assert "one device, run to compare with: step 1 of 2" in told


def test_a_hugging_face_model_is_shrunk_by_its_configuration() -> None:
    proof = prove(Llama(), ["fsdp=2,tp=2"])
    assert proof.holds, proof
    assert any(note.startswith("weights ") and "->" in note for note in proof.shrunk)
    assert "length 96 -> 16" in proof.shrunk
    small = shrunk(Llama(), Needs())
    norm = hostile(small.task, Trial(3)).model().model.norm.weight  # type: ignore[union-attr]
    assert float((norm.detach() - 1).abs().min()) > 0  # made hostile all the same
