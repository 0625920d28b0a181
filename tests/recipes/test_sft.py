"""The recipe `sft`: what is learned, from where it begins, and that packed conversations stay apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import phalanx
from phalanx.models.lora import FOUR_BITS, is_lora
from phalanx.models.nf4 import quantised
from phalanx.recipes.sft import SFT
from phalanx.train.check.beside import checked
from phalanx.train.overview import Overview

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

SMALL: dict[str, Any] = {"small": True, "length": 64, "global_batch": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model and its tokenizer."""
    torch.manual_seed(0)
    to, task = tmp_path_factory.mktemp("base"), SFT(**SMALL)
    task.model().save_pretrained(to)
    task._tokenizer.save_pretrained(to)
    return to


def test_answers_alone_are_learned_and_some_are_held_out() -> None:
    task = SFT(**SMALL)
    train, held = task.data(), task.held_out()
    tokenizer = task._tokenizer
    texts = [tokenizer.decode(sample["targets"][sample["targets"] >= 0]) for sample in train]
    assert all(text.endswith("<|end|>") or len(text) > 20 for text in texts)
    assert "The heart has four chambers" in "".join(texts + [tokenizer.decode(s["targets"].clamp(0)) for s in held])
    assert not any("What is" in text for text in texts)
    assert (len(train.documents), len(held.documents)) == (145, 16)


def test_packed_conversations_do_not_see_each_other() -> None:
    torch.manual_seed(0)
    model = SFT(**SMALL).model().double()
    model.config.use_cache = False  # as in training
    totals = []
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
        for packed in (True, False):
            task = SFT(**SMALL, share_held_out=0.0, packed=packed)
            samples = task.data()
            batch = task.collate([samples[index] for index in range(len(samples))])
            totals.append(task.loss(model(**task.inputs(batch)), batch))
    assert int(totals[0].count) == int(totals[1].count)
    assert float(totals[0].total) == pytest.approx(float(totals[1].total), rel=1e-12)


@pytest.mark.parametrize("lora", [0, 3])
def test_it_begins_with_the_weights_of_a_folder(folder: Path, lora: int) -> None:
    own = transformers.AutoModelForCausalLM.from_pretrained(folder)
    task = SFT(base=str(folder), length=64, global_batch=4, steps=2, lora=lora, learning_rate=1e-2, warmup_steps=0)
    before = {name: weight.detach().clone() for name, weight in own.named_parameters()}
    with phalanx.Engine(task, device="cpu") as engine:
        for batch in engine.batches():
            if batch.step == 0:
                tensors = batch.micro_batches[0].tensors
                with torch.no_grad():
                    expected = task.loss(own(**task.inputs(tensors)), tensors)
            metrics = engine.step(batch)
            if batch.step == 0:
                assert metrics.loss == pytest.approx(float(expected.total / expected.count), rel=1e-5)
        after = engine.whole_weights()
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed == (set() if lora else set(before))
    learned = [name for name in after if is_lora(name)]
    assert len(learned) == (2 * 7 * 4 if lora else 0)
    assert all(float(after[name].norm()) > 0 for name in learned)


def test_dora_begins_with_the_lengths_of_the_folders_rows(folder: Path) -> None:
    own = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    task = SFT(base=str(folder), length=64, steps=1, lora=2, lora_kind="dora", lora_targets=["q_proj", r".*\.up_proj"])
    with phalanx.Engine(task, device="cpu") as engine:
        found = engine.whole_weights()
    for name in ("model.layers.1.self_attn.q_proj", "model.layers.3.mlp.up_proj"):
        assert torch.allclose(found[f"{name}.lora_magnitude_vector"], own[f"{name}.weight"].norm(dim=1))
    assert sum(is_lora(name) for name in found) == 3 * 2 * 4


def test_what_cannot_be_is_refused(folder: Path) -> None:
    for settings, words in (
        ({"length": 4}, "no room for an answer"),
        ({"share_held_out": 1.0}, "is no share"),
        ({"lora_kind": "dora"}, "lora_kind would have no effect"),
        ({"lora_alpha": 32, "four_bit": True}, "lora_alpha and four_bit would have no effect"),
        ({"base_dtype": "bf16", "precision": "bf16"}, "base_dtype would have no effect without LoRA"),
        ({"lora": 2, "base_dtype": "bf16"}, "save nothing with precision=fp32"),
        ({"lora": 2, "lora_alpha": -3}, "lora_alpha=-3 is no factor"),
        ({"lora": 2, "lora_dropout": 1.0}, "lora_dropout=1.0 is no share"),
        ({"lora": 2, "precision": "fp8"}, "not in 8 bits"),
        ({"lora": 2, "adapter": "somewhere"}, "base=tiny is none"),
        ({"lora": -1}, "lora=-1 is no rank. Set lora to one from 1 up, or to 0 for none"),
    ):
        with pytest.raises(phalanx.WrongUse, match=words):
            SFT(**settings).check()
    with pytest.raises(phalanx.WrongUse, match=r"lora=1000 is no low rank: .* have ranks of 64 at most"):
        SFT(lora=1000).model()
    assert SFT(lora=1000).tiny().lora == 8
    with pytest.raises(phalanx.WrongUse, match="length=5000 is more than base=tiny has positions for, 4096"):
        SFT(length=5000).data()
    with pytest.raises(phalanx.WrongUse, match="lora_targets=k_prj matches no linear"):
        SFT(lora=2, lora_targets=["k_prj"]).model()


def asked(folder: Path, count: int) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": f"What is {n}?", "answer": "A number."}) for n in range(count)))
    return str(path)


@pytest.mark.parametrize(("rows", "share", "words"), [
    (3, 0.1, "share_held_out=0.1 of 3 rows is none of them. Set share_held_out to 0, or to 0.34 or more."),
    (3, 0.9, "share_held_out=0.9 of 3 rows is all of them. Set share_held_out to 0, or lower."),
    (1, 0.1, "share_held_out=0.1 of 1 row is none of them. Set share_held_out to 0."),
])  # fmt: skip
def test_a_share_that_leaves_a_part_empty_is_named_by_its_setting(
    tmp_path: Path, rows: int, share: float, words: str
) -> None:
    with pytest.raises(phalanx.WrongUse, match=words):
        SFT(path=asked(tmp_path, rows), share_held_out=share).data()


def test_what_became_of_rows_is_said_once(tmp_path: Path) -> None:
    path = Path(asked(tmp_path, 60))
    path.write_text(path.read_text() + '\n{"question": "What?"}')
    with phalanx.Engine(SFT(path=str(path), bad_rows="skip", global_batch=2), device="cpu") as engine:
        facts, notes = Overview(engine).facts(), Overview(engine).notes()
    assert facts["rows"].startswith("61: 1 left out, 6 held out, 54 packed into ")
    assert [note for note in notes if "row" in note] == [f"left out: {path}, row 61: it has question, but no answer"]


def test_refusals_of_data_name_no_line_of_ours(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "What?", "answer": 5}')
    for settings in ({"path": str(tmp_path / "rows.jsonl")}, {"base": "no/such model"}, {"lora": 1000}):
        found = checked(SFT(**settings))
        assert found.anyway
        assert "sft.py" not in found.refusal


def test_schedules() -> None:
    rates = {kind: SFT(rate=kind, steps=20, warmup_steps=10).schedule() for kind in ("cosine", "linear", "constant")}
    assert [round(rates[kind](4), 3) for kind in rates] == [0.5, 0.5, 0.5]
    assert [round(rates[kind](20), 3) for kind in rates] == [0.1, 0.0, 1.0]


def test_it_learns_the_shipped_answers() -> None:
    with phalanx.Engine(SFT(steps=60, learning_rate=5e-3), device="cpu") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        assert losses[0] > 6
        assert sum(losses[-5:]) / 5 < 4.0
        assert engine.evaluate()["loss"] < 4.6


def test_a_base_in_4_bits_is_the_folders_own_rounded(folder: Path) -> None:
    own = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()
    settings: dict[str, Any] = {"base": str(folder), "length": 64, "global_batch": 4, "steps": 2, "learning_rate": 1e-2}
    with phalanx.Engine(SFT(**settings, lora=3, four_bit=True), device="cpu") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        found = engine.whole_weights()
    with phalanx.Engine(SFT(**settings, lora=3), device="cpu") as engine:
        wide = [engine.step(batch).loss for batch in engine.batches()]
    assert losses == pytest.approx(wide, rel=1e-2)
    name = "model.layers.1.mlp.down_proj"
    expected = quantised(own[f"{name}.weight"])
    assert all(torch.equal(found[f"{name}.{part}"], bits) for part, bits in zip(FOUR_BITS, expected, strict=True))
    assert f"{name}.weight" not in found
    with pytest.raises(phalanx.WrongUse, match="lora_kind=dora needs whole weights"):
        SFT(lora=2, lora_kind="dora", four_bit=True).model()


def test_questions_are_made_once() -> None:
    task = SFT(**SMALL)
    assert task.questions() is task.questions()
    assert len(task.questions().every) > 0


def test_steps_of_about_one_length_or_of_so_many_tokens() -> None:
    plain: dict[str, Any] = {**SMALL, "packed": False, "share_held_out": 0.0}
    data = SFT(**plain, group_by_length=True, batch_tokens=300).data()
    lengths = np.array([len(sample["tokens"]) for sample in data])
    order = data.training_order(4, 0)
    steps = [lengths[order.ids(step)] for step in range(order.steps_in(1))]
    assert max(int(step.sum()) for step in steps) <= 300
    assert len({len(step) for step in steps}) > 1
    assert sum(len(step) * int(step.max()) for step in steps) < 1.1 * lengths.sum()
    task = SFT(**plain, batch_tokens=300, epochs=1.0, steps=100)
    with phalanx.Engine(task, device="cpu") as engine:
        assert "up to 300 tokens over all ranks as 1 micro-batch a step" in Overview(engine).facts()["batch"]
        assert task.steps == engine.order.steps_per_epoch
    for wrong, said in (
        ({"group_by_length": True}, "group_by_length has no effect on packed samples"),
        ({"batch_tokens": 300}, "batch_tokens has no effect on packed samples"),
        ({"batch_tokens": -1}, "batch_tokens=-1 is no number of tokens"),
    ):
        with pytest.raises(phalanx.WrongUse, match=said):
            SFT(**SMALL, **wrong).check()
