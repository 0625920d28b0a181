"""JSON files as no program writes them."""

from __future__ import annotations

DEEP = "[" * 100_000 + "]" * 100_000
ODD = {
    "nested too deep": DEEP, "an object nested too deep": '{"a":' * 100_000 + "1" + "}" * 100_000, "a list": "[]",
    "text": '"model"', "a number": "7", "null": "null", "nothing": "", "cut short": '{"model_type": "lla',
    "no UTF-8": "\udcff\udcfe",
}  # fmt: skip
"""By what is wrong with each, what a file holds that should hold an object."""


def written(name: str) -> bytes:
    """The bytes of such a file."""
    return ODD[name].encode(errors="surrogateescape")
