"""Many lines of events read at once: steps of one shape, which differ in their numbers alone, as columns.

A rank's steps are such lines, and reading each as JSON would take most of the time that a long run takes to open.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

NUMERIC = b"0123456789.-+"
FEWEST = 16
"""Of so many lines of one shape on they are read at once."""
WINDOW = 16
"""So many characters of a number are read: more than anybody can see of one."""
BLOCK = 1 << 20
"""Bytes that are read at once: what is made of them fits a processor's cache."""
MOST_COLONS = 1000
"""Lines with more are read one by one."""
COLON, DOT, COMMA, BRACE, NEWLINE, ZERO, MINUS, EXPONENT = b":.,}\n0-e"
_WEIGHTS = np.zeros((WINDOW + 1, WINDOW))
for _dot in range(WINDOW + 1):
    _WEIGHTS[_dot] = [10.0 ** (_dot - place - (place < _dot)) for place in range(WINDOW)]
    _WEIGHTS[_dot, _dot : _dot + 1] = 0.0
"""What digits are worth, by where the dot stands."""


@dataclass(frozen=True)
class Columns:
    """Lines of one shape: where each stood among all, and its numbers under the names that lead to them."""

    lines: np.ndarray
    values: dict[tuple[str, ...], np.ndarray]
    first: dict[str, Any]
    """The first of these events: what is no number is the same in all of them."""


def read(data: bytes) -> tuple[list[Columns], list[tuple[int, dict[str, Any]]]]:
    """Whole lines, as columns where many are alike; of the rest each that is an event, with its place."""
    known: list[Columns] = []
    single: list[tuple[int, dict[str, Any]]] = []
    at = count = 0
    while at < len(data):
        end = (data.rfind(b"\n", at, at + BLOCK) + 1) or (data.find(b"\n", at) + 1) or len(data)
        count += _read_block(data[at:end], count, known, single)
        at = end
    return known, single


def _read_block(data: bytes, count: int, known: list[Columns], single: list[tuple[int, dict[str, Any]]]) -> int:
    """Lines of which so many stood before; how many they are."""
    shapes: dict[bytes, int] = defaultdict(itertools.count().__next__)
    shape_of = np.array(list(map(shapes.__getitem__, data.translate(None, NUMERIC).split(b"\n")[:-1])), np.int64)
    data = bytes(WINDOW) + data + bytes(WINDOW)  # so that whatever is read of a number is there
    buffer = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(buffer == NEWLINE)
    begins = np.append(WINDOW, ends[:-1] + 1)
    colons = np.append(np.flatnonzero(buffer == COLON), np.full(MOST_COLONS + 1, len(data)))
    rest: list[int] = []
    for number in range(len(shapes)):
        lines = np.flatnonzero(shape_of == number)
        shape = _Shape.of(data[begins[lines[0]] : ends[lines[0]]]) if len(lines) >= FEWEST else None
        if shape is None:
            rest += lines.tolist()
            continue
        right, values = shape.numbers(buffer, begins[lines], ends[lines], colons)
        if not right.all():
            rest += lines[~right].tolist()
            lines, values = lines[right], {name: of[right] for name, of in values.items()}
        if len(lines):
            known.append(Columns(lines + count, values, shape.event))
    single += [(count + number, event) for number, event in _events(data, sorted(rest), begins, ends)]
    return len(ends)


def _events(data: bytes, numbers: list[int], begins: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, dict]]:
    for number in numbers:
        with suppress(ValueError):  # cut by a crash, or a full disk
            event = json.loads(data[begins[number] : ends[number]])
            if isinstance(event, dict):
                yield number, event


@dataclass(frozen=True)
class _Shape:
    """What all lines of one shape have in common: their names, and where numbers stand among their colons."""

    event: dict[str, Any]
    """The first line."""
    names: list[tuple[str, ...]]
    colons: int
    gaps: dict[int, int]
    """From each colon that no number follows to the next one, or to the end of the line."""
    places: list[int]
    """Of the numbers, by the colons before them."""
    after: list[int]
    """From the end of each number to the next colon, or to the end of the line."""
    small: list[bool]
    """Whether it is written with an exponent."""

    @classmethod
    def of(cls, line: bytes) -> _Shape | None:
        """None: it is no step, or one that cannot be read this way."""
        try:
            event = json.loads(line)
        except ValueError:
            return None
        if (
            not isinstance(event, dict)
            or event.get("kind") != "step"
            or b"[" in line.replace(b"[]", b"")
            or b"\\" in line
        ):
            return None
        names, texts = [], []
        for name, value in _leaves(event):
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                names.append(name)
            texts += [*name, *([value] if isinstance(value, str) else [])]
        found = list(re.finditer(rb'": (\d[\d.]*(e-\d\d)?)(?=[,}])', line))
        if len(found) != len(names) or any(re.search(r"[\d.+:-]", text) for text in texts):
            return None
        colons = [at for at, byte in enumerate(line) if byte == COLON]
        if len(colons) > MOST_COLONS:
            return None
        places = [colons.index(each.start() + 1) for each in found]
        after = [
            (colons[place + 1] if place + 1 < len(colons) else len(line)) - each.end()
            for place, each in zip(places, found, strict=True)
        ]
        following = [*colons[1:], len(line)]
        gaps = {at: following[at] - colons[at] for at in range(len(colons)) if at not in places}
        return cls(event, names, len(colons), gaps, places, after, [each[2] is not None for each in found])

    def numbers(
        self, buffer: np.ndarray, begins: np.ndarray, ends: np.ndarray, colons: np.ndarray
    ) -> tuple[np.ndarray, dict[tuple[str, ...], np.ndarray]]:
        """Which of these lines could be read, and the numbers of all of them."""
        first = np.searchsorted(colons, begins)
        right = colons[first + self.colons] > ends
        right &= colons[first + self.colons - 1] < ends
        for place, gap in self.gaps.items():
            following = colons[first + place + 1] if place + 1 < self.colons else ends
            right &= following - colons[first + place] == gap
        values = {}
        for name, place, after, small in zip(self.names, self.places, self.after, self.small, strict=True):
            start = colons[np.where(right, first + place, 0)] + 2
            following = colons[first + place + 1] if place + 1 < self.colons else ends
            end = np.where(right, following - after, start + 1)
            closing = buffer[np.minimum(end, len(buffer) - 1)]
            right &= (end > start) & ((closing == COMMA) | (closing == BRACE))
            values[name], fits = _parsed(buffer, start, end, small)
            right &= fits
        return right, values


def _leaves(event: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in event.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _parsed(buffer: np.ndarray, start: np.ndarray, end: np.ndarray, small: bool) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that stand there, and which of them are plain ones: digits, with a dot among them or none.

    Other characters than those of numbers cannot stand there, or the line would have another shape.
    """
    last = end - 4 if small else end
    ways = [_with_dots, _whole] if DOT in buffer[start[0] : last[0]] else [_whole, _with_dots]
    found, fits = ways[0](buffer, start, last)
    odd = np.flatnonzero(~fits)
    if len(odd):
        found[odd], fits[odd] = ways[1](buffer, start[odd], last[odd])
    if small:
        tens, ones = buffer[end - 2].astype(np.int64) - ZERO, buffer[end - 1].astype(np.int64) - ZERO
        fits &= (buffer[last] == EXPONENT) & (buffer[last + 1] == MINUS)
        with np.errstate(over="ignore", invalid="ignore"):  # of those that do not fit
            found *= 10.0 ** -(tens * 10.0 + ones)
    return found, fits


def _windows(buffer: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """Rows of the characters that stand from there on."""
    every = np.ndarray((len(buffer) - WINDOW + 1,), f"V{WINDOW}", buffer, strides=(1,))
    return every[begin].view(np.uint8).reshape(-1, WINDOW)


def _whole(buffer: np.ndarray, start: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers, and which of them are: neither a sign nor a dot is among their digits."""
    length = last - start
    inside = np.arange(WINDOW) >= WINDOW - length[:, None]
    digits = np.where(inside, _windows(buffer, last - WINDOW) - ZERO, 0)
    fits = (length > 0) & (length <= WINDOW) & (digits.max(1) < 10)
    return digits.astype(np.float64) @ _WEIGHTS[WINDOW], fits


def _with_dots(buffer: np.ndarray, start: np.ndarray, last: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Numbers with a dot, and which of them are: no sign comes first."""
    text, length = _windows(buffer, start), last - start
    short = np.flatnonzero(length < WINDOW)
    if len(short):
        text[short] = np.where(np.arange(WINDOW) < length[short, None], text[short], ZERO)
    fits = (length > 0) & (text[:, 0] - ZERO < 10)
    first = int((text[0] == DOT).argmax())
    if first and (text[:, first] == DOT).all():
        return (text - ZERO).astype(np.float64) @ _WEIGHTS[first], fits
    dot = (text == DOT).argmax(1)
    found = np.zeros(len(text))
    for place in np.flatnonzero(np.bincount(dot)):
        same = dot == place
        found[same] = (text[same] - ZERO).astype(np.float64) @ _WEIGHTS[place]
    return found, fits & (dot > 0)
