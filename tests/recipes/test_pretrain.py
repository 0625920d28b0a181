"""The recipe `pretrain`: it learns what each source has, and says how well for each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import phalanx
from phalanx.recipes.pretrain import Pretrain
from tests.recipes.test_corpus import text
from tests.test_cli import phalanx as command

SMALL = {"width": 32, "layers": 2, "heads": 2, "kv_heads": 1, "length": 32, "global_batch": 8, "tokenizer": "bytes"}


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    return str(text(tmp_path / "one.txt", "abcdefgh")), str(text(tmp_path / "two.txt", "zyxwvuts"))


def test_it_learns_each_source_by_its_weight(tmp_path: Path, sources: tuple[str, str]) -> None:
    """Each text has ten letters or so; one that is hardly trained on stays near what all bytes would give."""
    task = Pretrain(sources=sources, weights={"0": (1, 0), "0.9": (0.5, 0.5)}, steps=60, learning_rate=1e-2,
                    warmup_steps=5, cache=str(tmp_path / "cache"), **SMALL)  # type: ignore[arg-type] # fmt: skip
    with phalanx.Engine(task, device="cpu") as engine:
        losses = [engine.step(batch).loss for batch in engine.batches()]
        found = engine.evaluate()
    assert losses[0] > 5
    assert set(found) == {"loss", "loss_one", "loss_two"}
    assert found["loss_one"] < 0.6
    assert found["loss_one"] + 1 < found["loss_two"] < math.log(256) + 1
    assert found["loss_one"] < found["loss"] < found["loss_two"]


def test_a_mixture_is_certified_and_other_weights_are_other_samples(tmp_path: Path, sources: tuple[str, str]) -> None:
    words = [f"{name}={value}" for name, value in SMALL.items()]
    words += [f"sources={','.join(sources)}", f"cache={tmp_path / 'cache'}"]
    given = [word for setting in words for word in ("--set", setting)]
    run = ("--run", "run", "--on", "local:2", "--device", "cpu")
    done = command("train", "pretrain", *given, "--set", "weights=0.7,0.3", "--steps", "4", *run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    certificate = json.loads((tmp_path / "run" / "final" / "certificate.json").read_text())
    assert certificate["steps"] == 4
    other = command("train", "--resume", "--run", "run", "--set", "weights=0.5,0.5", "--steps", "6", cwd=tmp_path)
    assert other.returncode == 2
    assert "samples were mixed by other weights" in other.stderr
    longer = command("train", "--resume", "--run", "run", "--steps", "6", cwd=tmp_path)
    assert longer.returncode == 0, longer.stderr


def test_a_configuration_of_hugging_face_is_trained(tmp_path: Path, sources: tuple[str, str]) -> None:
    transformers = pytest.importorskip("transformers", reason="no transformers (pip install 'phalanx[hf]')")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=256, max_position_embeddings=32, **sizes).save_pretrained(tmp_path / "config")
    options = {"sources": sources[:1], "cache": str(tmp_path / "cache"), "config": str(tmp_path / "config"), "steps": 2}
    with phalanx.Engine(Pretrain(**SMALL | options), device="cpu") as engine:  # type: ignore[arg-type]
        losses = [engine.step(batch).loss for batch in engine.batches()]
    assert all(math.isfinite(loss) for loss in losses)


def test_a_model_that_does_not_keep_documents_apart_is_refused(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="no transformers (pip install 'phalanx[hf]')")
    transformers.OpenAIGPTConfig(vocab_size=256, n_embd=8, n_layer=1, n_head=2).save_pretrained(tmp_path)
    with pytest.raises(phalanx.WrongUse, match="OpenAIGPTLMHeadModel does not keep packed documents apart"):
        Pretrain(config=str(tmp_path), tokenizer="bytes").model()
