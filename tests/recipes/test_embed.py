"""The recipe `embed`: what is compared with what, how well it finds, and that it is the same however it is spread."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tqdm import tqdm

import phalanx
from phalanx import Layout
from phalanx.recipes.embed import Embed
from phalanx.train.overview import Overview
from tests.ranks import Ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")


@pytest.fixture(autouse=True)
def no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it leaves a thread behind."""
    monkeypatch.setattr(tqdm, "monitor_interval", 0)


SMALL: dict[str, Any] = {"small": True, "length": 24, "global_batch": 8, "steps": 3, "warmup_steps": 0}


def written(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder / "rows.jsonl")


def test_the_loss_is_that_of_each_query_among_all_texts() -> None:
    task = Embed(sizes=[3])
    output = torch.randn(4, 3, 8, dtype=torch.float64)
    ids = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 1, 7], [8, 9, -1]])
    found = task.loss(output, {"ids": ids})
    expected = 0.0
    for size in (8, 3):
        for row in range(4):

            def cosine(text: torch.Tensor, row: int = row, size: int = size) -> float:
                return float(F.cosine_similarity(output[row, 0, :size], text[:size], dim=0)) / 0.05

            own = cosine(output[row, 1])
            others = [
                cosine(output[other, place])
                for other in range(4) for place in (1, 2)
                if ids[other, place] not in (-1, ids[row, 1])  # neither absent nor the text itself
            ]  # fmt: skip
            expected += math.log(sum(math.exp(each - own) for each in [own, *others]))
    assert found.count == 4
    assert float(found.total) == pytest.approx(expected, rel=1e-9)


def losses(settings: dict[str, Any], layout: str) -> tuple[list[float], dict[str, float]]:
    with phalanx.Engine(Embed(**settings), Layout.parse(layout), device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()], engine.evaluate()


def test_any_layout_and_micro_batch_gives_the_losses_and_measures_of_one_device(ranks: Ranks) -> None:
    settings = SMALL | {"precision": "float64", "sizes": [8], "learning_rate": 1e-2}
    expected, measures = losses(settings, "dp=1")
    assert measures.keys() >= {"loss", "ndcg_10", "mrr_10", "recall_1", "recall_10", "ndcg_10_of_8"}
    for layout in ("dp=4,micro_batch=1", "fsdp=2,tp=2"):
        for found, measured in ranks(4, losses, settings, layout):
            assert found == pytest.approx(expected, rel=1e-10)
            assert measured == pytest.approx(measures, rel=1e-9)


def test_it_learns_to_find() -> None:
    with phalanx.Engine(Embed(steps=25, learning_rate=1e-3, global_batch=58), device="cpu") as engine:
        before = engine.evaluate()
        for batch in engine.batches():
            engine.step(batch)
        after = engine.evaluate()
    assert before["ndcg_10"] < 0.55
    assert after["ndcg_10"] > 0.67
    assert after["recall_10"] > 0.8


@pytest.mark.parametrize(("kind", "headless"), [("Bert", True), ("Bert", False), ("Llama", False)])
def test_it_begins_with_the_weights_of_a_folder(kind: str, headless: bool, tmp_path: Path) -> None:
    """Of an encoder, or of a language model with a head."""
    torch.manual_seed(0)
    small = Embed()
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(small._tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, pad_token_id=0,
    )  # fmt: skip
    name = f"{kind}Model" if headless else {"Bert": "BertForMaskedLM", "Llama": "LlamaForCausalLM"}[kind]
    saved = getattr(transformers, name)(config)
    saved.save_pretrained(tmp_path / "base")
    small._tokenizer.save_pretrained(tmp_path / "base")
    body = (saved if headless else saved.base_model).eval()
    task = Embed(base=str(tmp_path / "base"), length=24, global_batch=4, steps=1, pooling="last")
    with phalanx.Engine(task, device="cpu") as engine:
        batch = task.collate([task.held_out()[0]])
        with torch.no_grad():
            found = engine.model.eval()(**task.inputs(batch))
            size = int(batch["lengths"][0, 1])
            expected = body(input_ids=batch["tokens"][0, 1:2, :size]).last_hidden_state[0, -1]
    assert torch.allclose(found[0, 1], expected, atol=1e-6)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for settings, words in (
        ({"length": 1}, "no room for a text"),
        ({"share_held_out": 1.0}, "is no share"),
        ({"temperature": 0.0}, "temperature=0.0 is none"),
        ({"negatives": -1}, "negatives=-1 is no number of texts"),
    ):
        with pytest.raises(phalanx.WrongUse, match=words):
            Embed(**settings).check()
    with pytest.raises(phalanx.WrongUse, match="sizes=64 is no part of a vector of 64 numbers"):
        Embed(sizes=[64]).model()
    with pytest.raises(phalanx.WrongUse, match="length=600 is more than base=tiny has positions for, 512"):
        Embed(length=600).data()
    with pytest.raises(phalanx.WrongUse, match="leaves one part empty"):
        Embed(path=written(tmp_path, {"query": "a", "positive": "b"})).data()


def test_what_became_of_rows_is_said(tmp_path: Path) -> None:
    rows = [{"query": f"what is {n}", "positive": f"a number, {n}"} for n in range(20)]
    path = written(tmp_path, *rows, {"query": "what"})
    with phalanx.Engine(Embed(path=path, bad_rows="skip", global_batch=4, length=8), device="cpu") as engine:
        facts, notes = Overview(engine).facts(), Overview(engine).notes()
    assert facts["rows"].startswith("21: 1 left out, 2 held out, 18 of 0 hard negatives at most, the longest")
    assert f"left out: {path}, row 21: it has no positive" in notes[0]
