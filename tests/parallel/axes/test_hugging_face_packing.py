"""Packed documents in Hugging Face's models: told where each begins, they compute what their own dense mask gives."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import phalanx
from phalanx import Layout
from phalanx.attention import document_mask
from phalanx.kernels import documents as kernel_documents
from phalanx.kernels import packed_attention
from phalanx.parallel.axes import hugging_face, hugging_face_packing
from phalanx.parallel.axes.hugging_face_packing import bases, unfit
from tests.families import FamilyTask
from tests.hugging_face import CausalLanguageModel, config
from tests.parity import TOLERANCE, Trace, difference, reference, spread_run
from tests.ranks import Ranks

LAYOUTS = {
    2: ["dp=2,recompute=selective", "fsdp=2,recompute=full", "tp=2", "cp=2", "cp=2,cp_kind=ulysses",
        "pp=2,micro_batch=6,recompute=full"],
    4: ["cp=4", "cp=2,tp=2,recompute=full", "cp=2,pp=2,cp_kind=ulysses,micro_batch=6"],
}  # fmt: skip


@dataclass
class PackedModel(CausalLanguageModel):
    """Documents of lengths that differ from row to row."""

    def model(self) -> nn.Module:
        model = super().model()
        model.config.use_cache = False  # type: ignore[union-attr]  # with one, theirs does not look for documents
        return model

    def collate(self, samples: Any) -> dict[str, Tensor]:
        batch = super().collate(samples)
        places = torch.arange(batch["tokens"].shape[1])
        first = batch["tokens"][:, :1] % 4 + 1
        return batch | {"positions": torch.where(places < first, places, (places - first) % 3)}

    def inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"input_ids": batch["tokens"], "position_ids": batch["positions"]}


def run_all(kind: str, layouts: list[str]) -> list[tuple[Trace, int]]:
    found = []
    for layout in layouts:
        told = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal told
            told += 1
            return packed_attention.packed_attention(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hugging_face, "packed_attention", counted)
            found.append((spread_run(PackedModel(kind=kind, steps=2), Layout.parse(layout)), told))
    return found


@functools.cache
def one_device(kind: str, micro_batches: int) -> Trace:
    """By the model's own dense mask: a loop of one's own tells it nothing."""
    return reference(PackedModel(kind=kind, steps=2), micro_batches)


def compare(ranks: Ranks, world: int, kind: str, layouts: list[str], told: bool = True) -> None:
    wrong = []
    for layout, (trace, times) in zip(layouts, ranks(world, run_all, kind, layouts)[0], strict=True):
        micro_batches = Layout.parse(layout).micro_batches(PackedModel.global_batch)
        error, where = difference(trace, one_device(kind, micro_batches))
        if not error < TOLERANCE or bool(times) is not told:
            wrong.append(f"{layout}: {error:.1e} in {where}, told {times} times")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [2, 4])
def test_documents_stay_apart_under_every_layout(ranks: Ranks, world: int) -> None:
    compare(ranks, world, "llama", LAYOUTS[world])


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "gpt-neox", "phi3", "olmoe"])
def test_of_every_kind(ranks: Ranks, kind: str) -> None:
    compare(ranks, 2, kind, ["tp=2"])


def test_attention_that_drops_has_a_mask(ranks: Ranks) -> None:
    compare(ranks, 2, "gpt2", ["dp=2", "cp=2"], told=False)


def test_experts_get_their_tokens(ranks: Ranks) -> None:
    compare(ranks, 2, "olmoe", ["fsdp=2,ep=2"])


@pytest.mark.parametrize(("kind", "words"), [
    ("mistral", "is not full in all its blocks"),
    ("gemma2", "does not look up attn_implementation=.sdpa."),
    ("gpt-oss", "does not look up"),
    ("bloom", "does not look up"),
])  # fmt: skip
def test_whose_attention_is_another_is_not_told(kind: str, words: str) -> None:
    (base,) = bases(CausalLanguageModel(kind=kind).model())
    assert re.search(words, unfit(base))


def test_a_sliding_window_is_left_to_the_model(ranks: Ranks) -> None:
    compare(ranks, 2, "mistral", ["dp=2"], told=False)


def test_a_window_is_all_that_keeps_a_model_from_it() -> None:
    from transformers import AutoModelForCausalLM

    made = config("mistral")
    made.sliding_window = None  # type: ignore[attr-defined]
    (base,) = bases(AutoModelForCausalLM.from_config(made))
    assert not unfit(base)
    base.config.attn_logit_softcapping = 50.0  # type: ignore[union-attr]
    assert "caps" in unfit(base)


class Wrapped(nn.Module):
    """A model of theirs inside of one's own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **given: Any) -> Any:
        return self.inner(**given)


@dataclass
class Nested(PackedModel):
    def model(self) -> nn.Module:
        return Wrapped(super().model())


@dataclass
class Unpacked(CausalLanguageModel):
    def model(self) -> nn.Module:
        return Wrapped(super().model())


@pytest.mark.parametrize(("task", "shape"), [(Nested(), (1, 1, 16)), (Unpacked(), None)])
def test_what_blocks_are_told(task: phalanx.Task, shape: tuple[int, ...] | None) -> None:
    """Where documents begin, or nothing: and the model need not look for them."""
    seen: list[Any] = []
    with phalanx.Engine(task, "dp=1", device="cpu") as engine, pytest.MonkeyPatch.context() as patch:
        masking: Any = __import__("transformers").masking_utils
        patch.setattr(masking, "find_packed_sequence_indices", None)
        (base,) = bases(engine.model)
        block = next(module for module in base.modules() if type(module).__name__ == "LlamaDecoderLayer")
        block.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True
        )
        engine.step(next(engine.batches()))
    assert {None if mask is None else tuple(mask.shape[1:]) for mask in seen} == {shape}


def test_a_model_is_called_with_what_it_was_given() -> None:
    """Whatever else it does with a mask, nothing stands there that the task did not give."""
    for rows in (torch.arange(6).expand(2, 6), torch.tensor([[0, 1, 0, 1, 2, 0]] * 2)):
        layer = hugging_face_packing.DocumentStarts("", ["input_ids"])
        given: dict[str, Any] = layer(lambda *args, **kwargs: (args, kwargs), rows, position_ids=rows)
        assert given == ((rows,), {"position_ids": rows})


def mask_known(**given: Any) -> Any:
    """What a model's function that makes masks would be answered while the model computes."""
    layer, seen = hugging_face_packing.DocumentStarts("", ["input_ids"]), []
    layer(lambda *args, **kwargs: seen.append(hugging_face_packing._known[-1]), **given)
    assert not hugging_face_packing._known
    return seen[0]


def test_a_recorded_step_has_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made on the device from the positions that a replay finds there."""
    for module in (kernel_documents, hugging_face_packing):
        monkeypatch.setattr(module, "is_recorded", lambda column: True)
    places = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    expected = document_mask(torch.tensor([[0, 0, 1, 1, 1, 2], [0] * 6]))
    assert torch.equal(mask_known(input_ids=places, position_ids=places), expected)


def test_nothing_is_said_to_a_model_with_a_mask_of_the_tasks_own() -> None:
    rows = torch.arange(5).expand(2, 5)
    assert mask_known(attention_mask=torch.ones(2, 5), input_ids=rows) is None
    assert mask_known(input_ids=rows, position_ids=rows[None]) is None, "positions in several dims are the model's own"
    assert mask_known(input_ids=rows) is False


@pytest.mark.parametrize("kind", ["opt", "esm"])
def test_models_that_count_a_masks_tokens_train(kind: str) -> None:
    """Where nothing is packed: they number positions by their mask, whatever its shape."""
    with phalanx.Engine(FamilyTask(kind=kind), "dp=1", device="cpu") as engine:
        assert 3 < engine.step(next(engine.batches())).loss < 6
