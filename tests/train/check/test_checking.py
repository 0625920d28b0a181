"""Every planted mistake is found before the first step, with the user's line; nothing is found where nothing is."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from phalanx.train.check.beside import checked
from tests import mistakes
from tests.mistakes import LIKELY, MISTAKES, Points, WithHeldOut

SOURCE = Path(mistakes.__file__).read_text().splitlines()


def marked(kind: type[Points]) -> int | None:
    """The line that ends in ``# here``, in the class or with its name."""
    lines, first = inspect.getsourcelines(kind)
    for number, line in enumerate(lines):
        if line.rstrip().endswith("# here"):
            return first + number
    for number, line in enumerate(SOURCE, 1):
        if kind.__name__ in line.partition("# here:")[2].split():
            return number
    return None


@pytest.mark.parametrize("kind", MISTAKES, ids=lambda kind: kind.__name__)
def test_a_mistake_is_found(kind: type[Points]) -> None:
    found = checked(kind())
    text = "\n".join(found.warnings) if kind in LIKELY else found.refusal
    assert MISTAKES[kind] in text, found
    assert bool(found.refusal) != (kind in LIKELY)
    line = marked(kind)
    if line is not None:
        assert f"mistakes.py:{line}: " in text, f"{text}\nnames another line than {line}"


def test_there_are_enough_and_nearly_all_name_a_line() -> None:
    assert len(MISTAKES) >= 40
    assert sum(marked(kind) is None for kind in MISTAKES) <= 3


@pytest.mark.parametrize("kind", [Points, WithHeldOut])
def test_nothing_is_found_where_nothing_is(kind: type[Points]) -> None:
    found = checked(kind())
    assert (found.refusal, found.warnings, found.left_out) == ("", [], "")
