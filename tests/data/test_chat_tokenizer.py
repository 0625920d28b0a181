"""A small tokenizer made on the spot: the same in every process, and it gives back what it was given."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx import WrongUse
from phalanx.data.chat_tokenizer import opened, trained
from phalanx.data.tokenizer import CONFIG, FILE
from tests.damage import ODD, written

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


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("file", [FILE, CONFIG])
def test_files_that_make_no_sense_are_refused_in_one_line(file: str, name: str, tmp_path: Path) -> None:
    trained(["blood and bone"], 290).save_pretrained(tmp_path)
    (tmp_path / file).write_bytes(written(name))
    with pytest.raises(WrongUse, match=r"^there is no tokenizer in .*\. Set tokenizer to the folder of one\.$"):
        opened(tmp_path)


def test_code_that_comes_with_it_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is anybody asked whether it should be."""
    monkeypatch.setattr("builtins.input", lambda words: pytest.fail(f"it asked: {words}"))
    trained(["blood and bone"], 290).save_pretrained(tmp_path)
    said = json.loads((tmp_path / CONFIG).read_text())
    said |= {"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["own.Mine", None]}}
    (tmp_path / CONFIG).write_text(json.dumps(said))
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    with pytest.raises(WrongUse, match="asks for code of its own by auto_map, which is never run"):
        opened(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="there is no tokenizer in"):
        opened(tmp_path)
    trained(["a"], 270).save_pretrained(tmp_path)
    with pytest.raises(WrongUse, match=r"the chat template nowhere\.jinja is not there"):
        opened(tmp_path, "nowhere.jinja")
