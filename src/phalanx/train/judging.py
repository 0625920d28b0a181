"""A judge of the user's: how good an answer is, by a function in a file of theirs."""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from phalanx.errors import WrongUse, closest
from phalanx.questions import ModelAnswer

Judge = Callable[[str, str, str], float]
HOW = "Write it like --judge judges.py:score, a function(question, answer, reference) that returns a number."


def judge_of(reference: str) -> Judge:
    """The function that ``file.py:function`` names."""
    file, colon, name = reference.rpartition(":")
    path = Path(file)
    if not colon or path.suffix != ".py":
        raise WrongUse(f"--judge {reference} names no function of a file. {HOW}")
    if not path.is_file():
        raise WrongUse(f"the judge's file {file} is not there. Check the path.")
    spec = importlib.util.spec_from_file_location(f"phalanx_judge_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not callable(found):
        known = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise WrongUse(f"{file} has no function {name}; {closest(name, known)}")
    try:
        inspect.signature(found).bind("question", "answer", "reference")
    except ValueError:  # it does not say what it takes
        pass
    except TypeError as error:
        raise WrongUse(f"{name} of {file} cannot be called with three texts ({error}). {HOW}") from None
    judge: Judge = found
    return judge


def judged(judge: Judge, answers: Sequence[ModelAnswer]) -> float:
    """The mean of what a judge says."""
    return sum(_number(judge(each.question, each.answer, each.reference), judge) for each in answers) / len(answers)


def _number(value: Any, judge: Judge) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        name = getattr(judge, "__name__", "the judge")
        raise WrongUse(f"{name} gave {value!r} for an answer, which is no number. Have it return one for every answer.")
    return found
