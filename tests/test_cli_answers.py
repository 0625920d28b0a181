"""Words that the command line does not know are answered with ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from phalanx.cli import app
from phalanx.cli_answers import VERBS
from tests.test_cli import phalanx


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train sft --lora 4", "--lora is no option of phalanx train, but a setting of SFT: --set lora=4"),
        ("train --steps 3 sft --four-bit --lora=4", "but a setting of SFT: --set four_bit=true"),
        ("train sft --lr 1e-4 --quiet", "but a setting of SFT: --set learning_rate=1e-4"),
        ("train sft --batch-size=8", "which counts the samples of a step on all ranks together: --set global_batch=8"),
        ("train gpt --drop-last", "but a setting of GPT: --set last_batch=drop"),
        ("prove gpt --tp 2", "--tp is no option of phalanx prove, but part of a layout: --layouts tp=2"),
        ("train gpt --lora 4", "distil, which GPT does not have: phalanx train sft --set lora=4"),
        ("prove gpt --lora 4", "distil, which GPT does not have: phalanx prove sft --set lora=4"),
        ("tune rate gpt --width 64", "but a setting of GPT: --set width=64"),
    ],
)
def test_an_option_that_is_a_setting_is_answered_with_it(tmp_path: Path, words: str, told: str) -> None:
    done = phalanx(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("phalanx: ")
    assert done.stderr.endswith(f"{told}\n")


@pytest.mark.parametrize(
    "words", ["train sft --loar 4", "train nothing.py --lora 4", "train --lora 4", "runs --lora", "train gpt --loar 4"]
)
def test_what_is_not_known_is_refused_as_ever(tmp_path: Path, words: str) -> None:
    done = phalanx(*words.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert f"No such option: {words.split('--')[1].split()[0].join(('--', ''))}" in done.stderr


def test_values_are_not_taken_for_options(tmp_path: Path) -> None:
    done = phalanx("train", "gpt", "--set", "--width=3", cwd=tmp_path)
    assert done.returncode == 2
    assert "GPT has no field '--width'" in done.stderr


def test_a_verb_by_another_name_is_answered_with_ours(tmp_path: Path) -> None:
    names = set(typer.main.get_group(app).commands)
    for word, ours in VERBS.items():
        verb = ours.split()[0]
        assert verb in names or verb.startswith("--"), verb
        assert word not in names
    done = phalanx("ls", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "phalanx: there is no verb 'ls' here. Use phalanx runs\n")


def test_a_verb_that_is_misspelt_is_answered_with_the_nearest(tmp_path: Path) -> None:
    done = phalanx("trian", "gpt", cwd=tmp_path)
    assert done.returncode == 2
    assert "Did you mean 'train'?" in done.stderr
