"""Numbers read off many places of a text at once: 8 digits are one word of the processor, and a few products."""

from __future__ import annotations

import numpy as np

WORD = 8
"""Bytes."""
WIDE = 2 * WORD
"""So many digits before the dot and as many after it are read: more than a float64 has."""
ROOM = 2 * WIDE
"""Bytes that a text must have behind the last number; before the first there must be half as many."""
DOT, ZERO, MINUS, EXPONENT = b".0-e"
_word = np.uint64
_ZEROS, _ABOVE_NINE, _HIGH = _word(0x3030303030303030), _word(0x7676767676767676), _word(0x8080808080808080)
_PAIRS, _UPPER, _LOWER = _word(0x000000FF000000FF), _word(0x000F424000000064), _word(0x0000271000000001)
_FIRST = np.array([(1 << WORD * count) - 1 for count in range(WORD + 1)], np.uint64)
"""By how many of a word's first bytes count: these as bits that are set."""
_LAST = ~_FIRST[::-1]
"""And of its last bytes."""


def words(text: np.ndarray, begin: np.ndarray) -> np.ndarray:
    """The 8 bytes from each place on."""
    every = np.ndarray((len(text) - WORD + 1,), f"V{WORD}", text, strides=(1,))
    return every[begin].view("<u8")


def numbers(
    text: np.ndarray, start: np.ndarray, end: np.ndarray, small: bool, fine: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that stand there, and which of the places have one: digits, with a dot among them or none.

    ``small``: they are written with an exponent of two digits, ``e-05``. Not ``fine``: 8 digits after the dot will do.
    """
    negative = text[start] == MINUS
    signed = bool(negative.any())
    start = start + negative if signed else start
    last = end - 4 if small else end
    is_dot = text[start[0] : min(last[0], start[0] + WIDE)] == DOT
    dot = np.minimum(start + int(is_dot.argmax()), last) if is_dot.any() else last
    found, fits = _read(text, start, dot, last, fine)
    odd = np.flatnonzero(~fits)
    if len(odd):  # their dots are elsewhere, or they are no numbers
        found[odd], fits[odd] = _read(text, start[odd], _dots(text, start[odd], last[odd]), last[odd], fine)
    if small:
        tens, ones = text[end - 2].astype(np.int64) - ZERO, text[end - 1].astype(np.int64) - ZERO
        fits &= (text[last] == EXPONENT) & (text[last + 1] == MINUS)
        with np.errstate(over="ignore", invalid="ignore"):  # of those that do not fit
            found *= 10.0 ** -(tens * 10.0 + ones)
    return np.where(negative, -found, found) if signed else found, fits


def _dots(text: np.ndarray, start: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Where the dot of each is, or its end where it has none."""
    is_dot = text[start[:, None] + np.arange(WIDE + 1)] == DOT
    return np.minimum(np.where(is_dot.any(1), start + is_dot.argmax(1), last), last)


def _read(
    text: np.ndarray, start: np.ndarray, dot: np.ndarray, last: np.ndarray, fine: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers with their dots there, or at their ends."""
    whole, fraction = dot - start, last - dot - 1
    fits = (whole > 0) & (whole <= WIDE) & (fraction != 0)
    longest, behind = int(whole.max()), int(fraction.max())
    if longest == 1:
        digit = text[start] - ZERO
        found, bad = digit.astype(np.float64), (digit > 9).astype(np.uint64)
    else:
        found, bad = _eight(words(text, dot - WORD), _LAST[np.clip(whole, 0, WORD)])
    if longest > WORD:
        more, wrong = _eight(words(text, dot - WIDE), _LAST[np.clip(whole - WORD, 0, WORD)])
        found, bad = found + more * 1e8, bad | wrong
    if behind > 0:
        fits &= (text[dot] == DOT) | (fraction < 0)
        least, fine = int(fraction.min()), fine and behind > WORD
        digits, wrong = _eight(words(text, dot + 1), _kept(fraction, least))
        bad |= wrong
        if fine:  # both together, so that a number is rounded once
            more, wrong = _eight(words(text, dot + 1 + WORD), _kept(fraction - WORD, least - WORD))
            digits, bad = digits * 1e8 + more, bad | wrong
        seen = WIDE if fine else WORD
        if behind > seen:  # what is not read of it must be digits too
            bad |= np.where(fraction > seen, _strange(words(text, last - WORD) ^ _ZEROS), _word(0))
            fits &= fraction <= seen + (WIDE - WORD if fine else WIDE)
        found = found + digits / (1e16 if fine else 1e8)
    return found, fits & (bad == 0)


def _kept(count: np.ndarray, least: int) -> np.ndarray | None:
    """Of words of which so many of the first bytes count; None: all of them, everywhere."""
    return None if least >= WORD else _FIRST[np.clip(count, 0, WORD)]


def _eight(word: np.ndarray, kept: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Words of 8 digits as numbers, of those bytes that count; and what of them is no digit, as bits."""
    word = word ^ _ZEROS
    if kept is not None:
        word &= kept
    bad = _strange(word)
    word = word * _word(10) + (word >> _word(8))
    upper, lower = (word & _PAIRS) * _UPPER, ((word >> _word(16)) & _PAIRS) * _LOWER
    return ((upper + lower) >> _word(32)).astype(np.float64), bad


def _strange(word: np.ndarray) -> np.ndarray:
    """Which bytes are above nine, by their highest bits."""
    return ((word + _ABOVE_NINE) | word) & _HIGH
