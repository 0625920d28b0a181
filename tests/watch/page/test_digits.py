"""Numbers read off a text are those that float() reads."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from phalanx.watch.page.digits import ROOM, numbers

texts = st.one_of(
    st.integers(0, 10**16 - 1).map(str), st.floats(-1e6, 1e6).map(repr), st.floats(0, 1).map(lambda x: f"{x:.6f}"),
    st.sampled_from(["0", "-0.5", "1.", ".5", "1.2.3", "12e4", "--1", "nan", "1e-05", "0.12345678901234567e-5", "1 2"]),
)  # fmt: skip


def read(words: list[str], small: bool = False, fine: bool = True) -> tuple[np.ndarray, np.ndarray]:
    text, start, end = b" " * ROOM, [], []
    for word in words:
        start.append(len(text))
        text += word.encode()
        end.append(len(text))
        text += b", "
    return numbers(np.frombuffer(text + b" " * ROOM, np.uint8), np.array(start), np.array(end), small, fine)


def is_plain(word: str) -> bool:
    whole, dot, fraction = word.removeprefix("-").partition(".")
    return whole.isdigit() and (fraction.isdigit() if dot else True) and len(whole) <= 16 and len(fraction) <= 24


@given(st.lists(texts, min_size=1, max_size=20))
def test_plain_numbers_and_nothing_else(words: list[str]) -> None:
    found, fits = read(words)
    for word, value, fit in zip(words, found, fits, strict=True):
        assert fit == is_plain(word), word
        if fit:
            assert np.isclose(value, float(word), rtol=1e-15, atol=1e-16), word


@given(st.lists(st.floats(1e-99, 9.9e-5, exclude_max=True), min_size=1, max_size=20))
def test_exponents(values: list[float]) -> None:
    found, fits = read([f"{value:.15e}" for value in values], small=True)
    assert fits.all()
    np.testing.assert_allclose(found, values, rtol=1e-13)
    assert not read(["0.5", "12.25"], small=True)[1].any()


def test_eight_digits_do_for_seconds() -> None:
    found, fits = read(["0.12345678901234567", "3.5", "0.123456789e-5", "0.1234567890123e-05"], fine=False)
    assert fits.tolist() == [True, True, False, False], "what is not read of a number must be digits too"
    np.testing.assert_allclose(found[:2], [0.12345678, 3.5])
