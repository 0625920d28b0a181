"""The model of lm-evaluation-harness: likelihoods and answers are those of the run's weights, by its own evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tqdm import tqdm

import phalanx
from phalanx import WrongUse
from phalanx.recipes.sft import SFT
from phalanx.train.exporting import export_run

lm_eval = pytest.importorskip("lm_eval", reason="no lm_eval (pip install 'phalanx[evaluate]')")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from phalanx.train.harness import HarnessModel  # noqa: E402

OPTIONS: dict[str, Any] = {"device": "cpu", "batch_size": 2, "dtype": "float32"}


@pytest.fixture(scope="module", autouse=True)
def no_bar() -> Any:
    """Or it leaves a thread behind."""
    before, tqdm.monitor_interval = tqdm.monitor_interval, 0
    yield
    tqdm.monitor_interval = before


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness") / "run"
    phalanx.train(SFT(small=True, length=64, steps=2, lora=2, answers=0), run=folder, device="cpu", quiet=True)
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> HarnessModel:
    return HarnessModel(run=str(run), **OPTIONS)


def asked(kind: str, *arguments: Any) -> Any:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def likelihood(model: HarnessModel, tokens: list[int], begin: int) -> float:
    with torch.no_grad():
        logits = model.model(torch.tensor([tokens])).logits[0]
    scores = F.log_softmax(logits.double(), dim=-1)
    return sum(float(scores[place - 1, tokens[place]]) for place in range(begin, len(tokens)))


def test_likelihoods_are_those_of_its_weights(model: HarnessModel) -> None:
    context, more = "What does the heart do?", " It pumps blood."
    ((found, _),) = model.loglikelihood([asked("loglikelihood", context, more)])
    first, every = model.tok_encode(context), model.tok_encode(context + more)
    assert found == pytest.approx(likelihood(model, every, len(first)), rel=1e-4)
    (rolling,) = model.loglikelihood_rolling([asked("loglikelihood_rolling", more)])
    whole = [model.prefix_token_id, *model.tok_encode(more)]
    assert rolling == pytest.approx(likelihood(model, whole, 1), rel=1e-4)


def test_answers_are_greedy_and_end_where_asked(model: HarnessModel) -> None:
    request = asked("generate_until", "What is a fever?", {"until": ["."], "max_gen_toks": 5, "do_sample": False})
    (found,) = model.generate_until([request])
    prompt = torch.tensor([model.tok_encode("What is a fever?")])
    out = model.model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=5)
    expected = model.tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
    assert found == expected.split(".")[0]


def test_an_exported_folder_is_the_same(run: Path, model: HarnessModel, tmp_path: Path) -> None:
    export_run(run, tmp_path / "whole", merge=True)
    other = HarnessModel(folder=str(tmp_path / "whole"), **OPTIONS)
    request = [asked("loglikelihood", "A fever is", " a body temperature")]
    assert other.loglikelihood(request) == model.loglikelihood(request)


def test_the_harness_runs_a_task_with_it(model: HarnessModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # as one of its packages does
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [
        {"q": "The heart pumps", "a": [" blood", " air"], "right": 0},
        {"q": "Bones are", "a": [" wet", " hard"], "right": 1},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny.yaml").write_text(
        "task: tiny\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {tmp_path / 'rows.jsonl'}\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_text: '{{q}}'\ndoc_to_choice: '{{a}}'\n"
        "doc_to_target: '{{right}}'\nmetric_list:\n  - metric: acc\n"
    )
    tasks = TaskManager(include_path=str(tmp_path))
    found = lm_eval.simple_evaluate(model=model, tasks=["tiny"], task_manager=tasks, bootstrap_iters=0)
    expected = []
    for row in rows:
        scores = model.loglikelihood([asked("loglikelihood", row["q"], choice) for choice in row["a"]])
        expected.append(max(range(2), key=lambda n: scores[n][0]) == row["right"])
    assert found["results"]["tiny"]["acc,none"] == sum(expected) / 2


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    for options, words in (
        ({}, "of a run or of a folder"),
        ({"run": "a", "folder": "b"}, "of a run or of a folder"),
        ({"folder": "b", "checkpoint": 3}, "checkpoint is of a run"),
        ({"folder": str(tmp_path)}, "holds no model of Hugging Face's"),
    ):
        with pytest.raises(WrongUse, match=words):
            HarnessModel(**options)
