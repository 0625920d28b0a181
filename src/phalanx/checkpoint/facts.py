"""What a checkpoint says of its run beside tensors, and which values each of these facts may have.

Whoever can write a manifest can write its checksum: nothing of it is used before it was checked here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phalanx.errors import WrongUse
from phalanx.layout import MOST_RANKS, Layout
from phalanx.parallel.blocks.fp8 import MAXIMA
from phalanx.schema import (
    Check,
    anything,
    each,
    is_count,
    is_flag,
    is_number,
    is_plain,
    is_text,
    is_whole,
    maybe,
    record,
    row,
    short,
    table,
)


def is_layout(value: Any) -> bool:
    """Whether this is the text of a layout."""
    try:
        return isinstance(value, str) and bool(Layout.parse(value))
    except WrongUse:
        return False


def _has_no_attribute_of_python(value: Any) -> bool:
    return table(is_plain)(value) and not any(name.rpartition(".")[2].startswith("_") for name in value)


def _are_samples(value: Any) -> bool:
    return table(is_text)(value) and all(name.isdecimal() for name in value)


def _are_scales(value: Any) -> bool:
    """Whether these are the scales of linears in 8 bits: of each its maxima, and the linear whose input it shares."""
    linear = row(*[is_number] * (MAXIMA + 1), is_text)
    if not record({}, {"steps": is_count, "linears": table(linear)})(value):
        return False
    linears = value.get("linears", {})
    return all(found[-1] in linears for found in linears.values())


FACTS: dict[str, Check] = {
    "step": is_count,
    "samples": is_count,
    "terms": is_number,
    "scale": row(is_number, is_count, is_flag),
    "guard": record({"losses": each(is_number), "bad_in_a_row": is_count, "left_out": each(is_count)}),
    "seed": is_whole,
    "global_batch": lambda value: is_count(value) and value > 0,
    "data": is_count,
    "layout": is_layout,
    "world": lambda value: is_count(value) and 0 < value <= MOST_RANKS,
    "generation": is_count,
    "options": table(table(is_plain)),
    "attributes": _has_no_attribute_of_python,
    "tied": table(is_text),
    "compared": maybe(is_count),
    "code": is_text,
}
"""What a run is taken up by."""
OPTIONAL: dict[str, Check] = {
    "rank": is_count,
    "good": maybe(is_count),
    "fp8": maybe(_are_scales),
    "streams": each(is_text),
    "task": is_text,
    "precision": is_text,
    "settings": table(anything),
    "optimizer": table(is_plain),
    "files": table(is_text),
    "order": table(anything),
    "fingerprint": maybe(record({"size": is_count, "samples": _are_samples, "repeatable": is_flag})),
    "versions": table(is_text),
    "callbacks": table(anything),
    "ended": maybe(record({"step": is_count, "of": is_count, "why": is_text})),
    "comm": table(is_text),
    "outer": maybe(row(is_number, is_number)),
    "owed_missing": is_flag,
    "frozen": record({"from": is_text, "hash": is_text}, {"tensors": table(row(is_text, each(is_count), is_text))}),
}
"""What some versions, or some runs, say besides."""


def checked_facts(facts: Any) -> dict[str, Any]:
    """The facts of a checkpoint; ValueError for what makes no sense."""
    if not isinstance(facts, dict):
        raise ValueError(f"its facts are {short(facts)}")
    if "step" not in facts:
        raise ValueError("it has no step")
    for name, check in (FACTS | OPTIONAL).items():
        if name in facts and not check(facts[name]):
            raise ValueError(f"{name} is {short(facts[name])}")
    return facts


def missing_fact(facts: Mapping[str, Any]) -> str:
    """A fact that a run is taken up by and that is not there; empty if all are."""
    return min(FACTS.keys() - facts.keys(), default="")
