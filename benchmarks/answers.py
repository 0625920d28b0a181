"""Answers: tokens that a model computes, and a processor's time, with kept keys and values against whole forwards.

    python benchmarks/answers.py [--quick]

Four prompts of 32 to 128 tokens and 48 tokens after each, as an evaluation has them (`train/answering.py`), by
a Llama of 8 blocks on one thread. Both ways give the same tokens, which is checked, and begin with weights that were
never trained. Tokens are counted where the model embeds them; a trial of whether keys can be kept is in the time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

import phalanx
from phalanx.questions import Question, Questions
from phalanx.recipes.sft import SFT
from phalanx.train.answering import MOST_TOKENS
from phalanx.train.next_tokens import NextTokens
from report import Figure, report

LENGTHS = (32, 64, 96, 128)


@dataclass
class Asked(SFT):
    """A base that is some work."""

    width: int = 512
    layers: int = 8
    steps: int = 0

    def tiny_config(self) -> Any:
        config = super().tiny_config()
        config.hidden_size, config.intermediate_size = self.width, 4 * self.width
        config.num_hidden_layers, config.head_dim = self.layers, self.width // config.num_attention_heads
        return config


@torch.no_grad()
def answered(engine: phalanx.Engine, whole: bool) -> tuple[list[list[int]], int, float]:
    """Rows with their answers, tokens that were computed, and seconds of a processor."""
    every = [Question([(11 * place + 3 * length) % 97 for place in range(length)], "", "") for length in LENGTHS]
    counted: list[int] = []
    embedding = engine.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda module, args, out: counted.append(args[0].numel()))
    engine.spread.model.eval()
    began = time.process_time()
    next_tokens = NextTokens(engine, Questions(every, str, frozenset(), max(LENGTHS) + MOST_TOKENS), every)
    next_tokens.why = "asked for" if whole else next_tokens.why
    rows = [list(question.tokens) for question in every]
    for _ in range(MOST_TOKENS):
        rows = [[*row, token] for row, token in zip(rows, next_tokens(rows), strict=True)]
    took = time.process_time() - began
    hook.remove()
    assert whole == bool(next_tokens.why), next_tokens.why
    return rows, sum(counted), took


def figures(quick: bool) -> Iterator[Figure]:
    with phalanx.Engine(Asked(width=128 if quick else 512, packed=False), device="cpu") as engine:
        found = [(answered(engine, whole=False), answered(engine, whole=True)) for _ in range(2 if quick else 4)][1:]
    for kept, whole in found:
        assert kept[0] == whole[0]
    kept, whole = (min((pair[way] for pair in found), key=itemgetter(2)) for way in (0, 1))
    yield Figure("tokens computed, of those of whole forwards", kept[1] / whole[1], 0.2, f"{kept[1]:,} of {whole[1]:,}")
    note = f"{kept[2]:.2f} s against {whole[2]:.2f} s, the least of {len(found)}"
    yield Figure("processor time, of that of whole forwards", kept[2] / whole[2], 0.5, note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    report(list(figures(parser.parse_args().quick)))
