"""A small tokenizer made on the spot: the same in every process, and it gives back what it was given."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.data.chat_tokenizer import opened, trained

pytest.importorskip("transformers", reason="transformers is not installed (the dev extra has it)")

CODE = "from phalanx.recipes.sft import SFT; print(sorted(SFT()._tokenizer.get_vocab().items()))"


def test_it_is_the_same_in_every_process() -> None:
    first, second = (subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True) for _ in range(2))
    assert first.stdout == second.stdout, first.stderr
    assert "<|end|>" in first.stdout


def test_text_comes_back_and_so_does_a_saved_one(tmp_path: Path) -> None:
    made = trained(["blood and bone", "bone and blood"], 290)
    text = "blood, bône and ☃"
    assert made.decode(made(text)["input_ids"]) == text
    made.save_pretrained(tmp_path)
    again = opened(tmp_path)
    assert again(text)["input_ids"] == made(text)["input_ids"]
    assert again.chat_template == made.chat_template
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }}")
    assert opened(tmp_path, str(tmp_path / "own.jinja")).chat_template == "{{ messages[0]['content'] }}"


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="there is no tokenizer in"):
        opened(tmp_path)
    trained(["a"], 270).save_pretrained(tmp_path)
    with pytest.raises(WrongUse, match=r"the chat template nowhere\.jinja is not there"):
        opened(tmp_path, "nowhere.jinja")
