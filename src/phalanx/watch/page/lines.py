"""Many lines of events read at once: steps of one shape, which differ in their numbers alone, as columns.

A rank's steps are such lines, and reading each as JSON would take most of the time that a long run takes to open. The
first line that is left is read as JSON, and gives the text that lines of its shape have around their numbers; whichever
lines have that text are of its shape, and their numbers are read together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from phalanx.event_fields import is_event
from phalanx.watch.page.digits import ROOM, WORD, numbers, words

BEGIN = b'{"kind": "step",'
"""A step's line begins so; any other is read by itself."""
FEWEST = 16
"""Of so many lines of one shape on they are read at once."""
MOST_SHAPES = 64
"""Of a block: lines of more are read one by one."""
BLOCK = 1 << 20
"""Bytes that are read at once: what is made of them fits a processor's cache."""
MOST_COLONS = 1000
"""Lines with more are read one by one."""
COLON, NEWLINE = b":\n"
ALL = np.uint64(2**64 - 1)
"""A word of which every bit counts."""
_NUMBER = re.compile(rb'": (-?\d+(?:\.\d+)?(e-\d\d)?)(?=[,}])')
_HASH = re.compile(rb'"samples": "[0-9a-f]{16}"')
"""Of a batch's samples: another in every step, and nothing that is shown."""
Names = tuple[str, ...]


@dataclass(frozen=True)
class Columns:
    """Lines of one shape: where each stood among all, and its numbers under the names that lead to them."""

    lines: np.ndarray
    values: dict[Names, np.ndarray]
    first: dict[str, Any]
    """The first of these events: what is no number is the same in all of them, but for the hash of their samples."""


def read(
    data: bytes, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[list[Columns], list[tuple[int, dict[str, Any]]]]:
    """Whole lines, as columns where many are alike; of the rest each that is an event, with its place.

    ``wanted``: whether the numbers under a name are read where there are many.
    """
    known: list[Columns] = []
    single: list[tuple[int, dict[str, Any]]] = []
    at = count = 0
    while at < len(data):
        end = (data.rfind(b"\n", at, at + BLOCK) + 1) or (data.find(b"\n", at) + 1) or len(data)
        count += _Block.of(data, at, end).read(count, wanted, known, single)
        at = end
    return known, single


@dataclass(frozen=True)
class _Block:
    """Some lines, and where in them their colons are."""

    data: bytes
    """What they are a part of."""
    text: np.ndarray
    begins: np.ndarray
    ends: np.ndarray
    colons: np.ndarray
    first: np.ndarray
    """The first colon of each line."""
    count: np.ndarray
    """How many colons it has."""

    @classmethod
    def of(cls, data: bytes, at: int, end: int) -> _Block:
        text = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(text[at:end] == NEWLINE) + at
        begins = np.append(at, ends[:-1] + 1)
        colons = np.flatnonzero(text[at:end] == COLON) + at
        first = np.searchsorted(colons, np.append(begins, end))
        return cls(data, text, begins, ends, colons, first[:-1], np.diff(first))

    def read(
        self, count: int, wanted: Callable[[str], bool], known: list[Columns], single: list[tuple[int, dict[str, Any]]]
    ) -> int:
        """Of lines of which so many stood before; how many they are."""
        is_step = self.ends < len(self.data) - ROOM  # so that whatever is read of a number is there
        is_step[is_step] = _has(self.text, self.begins[is_step], self.begins[is_step] + len(BEGIN), BEGIN)
        left, rest = np.flatnonzero(is_step), np.flatnonzero(~is_step).tolist()
        for _ in range(MOST_SHAPES):
            if len(left) < FEWEST:
                break
            first = left[len(left) // 2 :][:1]  # one in the middle: the first ones are often like no others
            shape = _Shape.of(self.data[self.begins[first[0]] : self.ends[first[0]]])
            lines, values = (
                shape.numbers(self, left[self.count[left] == shape.colons], wanted) if shape else (first, {})
            )
            if shape is None or len(lines) < FEWEST:
                lines = first
                rest += first.tolist()
            else:
                known.append(Columns(lines + count, values, shape.event))
            left = np.setdiff1d(left, lines, assume_unique=True)
        single += [(count + number, event) for number, event in self._events(sorted([*rest, *left.tolist()]))]
        return len(self.ends)

    def _events(self, numbers: list[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        for number in numbers:
            with suppress(ValueError, RecursionError):  # cut by a crash, or a full disk
                event = json.loads(self.data[self.begins[number] : self.ends[number]])
                if isinstance(event, dict) and is_event(event):
                    yield number, event


@dataclass(frozen=True)
class _Shape:
    """What all lines of one shape have in common: texts, and between any two of them a number."""

    event: dict[str, Any]
    """The first line."""
    names: list[Names]
    small: list[bool]
    """Whether a number is written with an exponent."""
    texts: list[bytes]
    """One more than there are numbers."""
    colons: int
    places: list[int]
    """Of the numbers, by the colons before them."""
    after: list[int]
    """From the end of each number to the next colon, or to the end of the line."""

    @classmethod
    def of(cls, line: bytes) -> _Shape | None:
        """None: it cannot be read this way."""
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if b"\\" in line or not isinstance(event, dict) or not is_event(event) or event["kind"] != "step":
            return None
        if isinstance(event.get("samples"), str):
            event["samples"] = ""
        names = [name for name, value in _leaves(event) if type(value) in (int, float)]
        found = list(_NUMBER.finditer(line))
        colons = [at for at, byte in enumerate(line) if byte == COLON]
        if len(found) != len(names) or not names or len(colons) > MOST_COLONS:
            return None
        spans = [0, *(edge for each in found for edge in each.span(1)), len(line)]
        texts = [line[spans[at] : spans[at + 1]] for at in range(0, len(spans), 2)]
        places = [colons.index(each.start() + 1) for each in found]
        following = [*colons, len(line)]
        after = [following[place + 1] - each.end(1) for place, each in zip(places, found, strict=True)]
        return cls(event, names, [each[2] is not None for each in found], texts, len(colons), places, after)

    def numbers(
        self, block: _Block, lines: np.ndarray, wanted: Callable[[str], bool]
    ) -> tuple[np.ndarray, dict[Names, np.ndarray]]:
        """Of these lines, each with as many colons, those that are of this shape, and their numbers."""
        values: dict[Names, np.ndarray] = {}
        first, edge = block.first[lines], block.begins[lines]
        for at, (name, place) in enumerate(zip(self.names, self.places, strict=True)):
            start = block.colons[first + place] + 2
            following = block.colons[first + place + 1] if place + 1 < self.colons else block.ends[lines]
            end = following - self.after[at]
            right = _has(block.text, edge, start, self.texts[at]) & (end > start)
            if right.all() and wanted(name[0]):
                values[name], right = numbers(block.text, start, end, self.small[at], fine=name[0] != "seconds")
            if not right.all():
                return self.numbers(block, lines[right], wanted) if right.any() else (lines[:0], {})
            edge = end
        right = _has(block.text, edge, block.ends[lines], self.texts[-1])
        return lines[right], {name: found[right] for name, found in values.items()}


def _has(text: np.ndarray, begin: np.ndarray, end: np.ndarray, expected: bytes) -> np.ndarray:
    """Between which of these places this text stands, whatever its hash is."""
    found = end - begin == len(expected)
    counts = bytearray(b"\xff" * len(expected))
    for each in _HASH.finditer(expected):
        counts[each.end() - 17 : each.end() - 1] = bytes(16)
    size = -(-len(expected) // WORD) * WORD  # so many bytes before its end are looked at
    masks = np.frombuffer(bytes(counts).rjust(size, b"\0"), "<u8")
    known = np.frombuffer(expected.rjust(size, b"\0"), "<u8") & masks
    for place, (mask, word) in enumerate(zip(masks, known, strict=True)):
        if mask:
            there = words(text, end - (size - place * WORD))
            found &= (there if mask == ALL else there & mask) == word
    return found


def _leaves(event: dict[str, Any], above: Names = ()) -> Iterator[tuple[Names, Any]]:
    for name, value in event.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value
