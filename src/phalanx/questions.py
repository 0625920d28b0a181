"""Questions for a language model to answer while it is evaluated, and what its answers are held against."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Question:
    """A prompt, and the answer that the data has."""

    tokens: Sequence[int]
    """The prompt, as the model is given it."""
    text: str
    """The question in its author's words."""
    reference: str
    prompt: str = ""
    """The prompt as text: all that was said before, as a template writes it."""


@dataclass(frozen=True)
class Questions:
    """Questions, and how a causal language model's answers to them are read."""

    every: Sequence[Question]
    decode: Callable[[Sequence[int]], str]
    """From the tokens of an answer to its text."""
    ends: frozenset[int]
    """Tokens that end an answer."""
    length: int
    """Tokens of a prompt and its answer together, at most."""
    pad: int = 0
    shown: int = 3
    """So many are answered at each evaluation while a run trains."""


@dataclass(frozen=True)
class ModelAnswer:
    """What a model said."""

    question: str
    answer: str
    reference: str
    prompt: str = ""

    @property
    def exact(self) -> bool:
        """Whether it is the reference, but for spaces."""
        return self.answer.split() == self.reference.split()
