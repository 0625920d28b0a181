"""The likeliest token after each row, by the forward that a model trains with.

Where it can be, what attention has computed of earlier tokens is kept: the model is then called with the newest token
of each row alone. Hugging Face's models keep it themselves (``use_cache``), others in a `KeyValues`. Whether a model
gives the same so is tried with the first rows, and what cannot be, or does not, costs a whole forward for each token:

- under ``cp``, whose ranks have parts of every sequence: a single token has none;
- under ``pp``: a model of Hugging Face's asks its first block how much is kept, and later stages do not have that one;
- in compiled blocks, which would be compiled again for every length of what is kept.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from phalanx.data.loader import MicroBatch
from phalanx.key_values import KeyValues
from phalanx.logits import Logits
from phalanx.models.beside import beside_names
from phalanx.models.transformer import Attention
from phalanx.parallel.blocks.probe import HALF, TOLERANCE
from phalanx.questions import Question, Questions
from phalanx.train.step import compute

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

ROUND = 16
"""Lengths of whole rows are padded to a multiple of this, so that there are few of them."""
WITHOUT = ("pp", "cp")
"""Axes under which nothing is kept."""
OWN, HUGGING_FACES = ("key_values", "positions", "documents"), ("past_key_values", "use_cache", "attention_mask")
"""What a forward takes that keeps keys."""
INPUTS = {"input_ids", "position_ids", "attention_mask"}
"""Of a model of Hugging Face's: what is known to go with kept keys."""


class NextTokens:
    """Tokens after rows that grow by one each time, of at most a few rows. All ranks must call it."""

    def __init__(self, engine: Engine, questions: Questions, asked: Sequence[Question]) -> None:
        self.engine, self.questions = engine, questions
        self.names = inspect.signature(engine.spread.model.forward).parameters
        self.why = self._refusal(asked)
        """Why nothing is kept; empty: it is."""
        self.kept: KeptKeys | None = None
        self.tried = False
        self._say()

    def begin(self) -> None:
        """Other rows come."""
        self.kept = None

    def __call__(self, rows: list[list[int]]) -> list[int]:
        """Nothing where another stage of a pipeline knows them."""
        if self.why or not self.tried:
            found = self._whole(rows)
            if not self.why:
                self._try(rows, found)
        elif self.kept is None:
            self.kept = KeptKeys(self, rows)
            found = self.kept.logits
        else:
            found = self.kept.longer(rows)
        return [] if found is None else [int(token) for token in found.argmax(-1)]

    def _whole(self, rows: list[list[int]]) -> Tensor | None:
        """Logits after each row, by a forward of all its tokens."""
        longest = min(-(-max(map(len, rows)) // ROUND) * ROUND, max(self.questions.length, max(map(len, rows))))
        tokens = torch.full((len(rows), longest), self.questions.pad)
        for number, row in enumerate(rows):
            tokens[number, : len(row)] = torch.tensor(row)
        places = torch.arange(longest).expand(len(rows), -1).contiguous()
        logits, _ = self.forward(tokens, places, torch.zeros_like(places))
        return None if logits is None else logits[range(len(rows)), [len(row) - 1 for row in rows]]

    def forward(
        self, tokens: Tensor, places: Tensor, documents: Tensor, more: Mapping[str, Any] | None = None
    ) -> tuple[Tensor | None, Any]:
        """Logits of a batch, and what the model keeps of it."""
        engine, spread = self.engine, self.engine.spread

        def finish(output: Any, _: dict[str, Any]) -> tuple[Tensor, Any]:
            logits = output["logits"] if isinstance(output, Mapping) else getattr(output, "logits", output)
            return logits.tensor() if isinstance(logits, Logits) else logits, getattr(output, "past_key_values", None)

        batch = {"tokens": tokens, "positions": places, "documents": documents}
        micro = MicroBatch(batch, np.arange(len(tokens)))
        actions = spread.forwards(1)
        spread.start([micro], actions)
        spread.samples.start(None, 1, None)
        found: tuple[Tensor | None, Any] = None, None
        for action in actions:
            result = compute(engine, engine.step_number, micro, action, finish, more)
            found = result if spread.gives_loss(action) else found
        return found

    def _refusal(self, asked: Sequence[Question]) -> str:
        layout, model = self.engine.layout, self.engine.spread.model
        axes = [f"{axis}={getattr(layout, axis)}" for axis in WITHOUT if getattr(layout, axis) > 1]
        axes += [f"compile={layout.compile}"] if layout.compile != "none" else []
        if axes:
            return f"under {','.join(axes)} none are kept"
        if beside := beside_names(model):
            return f"its {beside[0]} would be given the same ones"
        if any(getattr(module, "capacity", None) is not None for module in model.modules()):
            return "experts with a capacity must see whole sequences"
        if any(len(question.tokens) < 2 for question in asked):
            return "a question has one token"
        place = torch.zeros(1, 1, dtype=torch.int64)
        inputs = self.engine.task.inputs(
            self.engine.to_device({"tokens": place, "positions": place, "documents": place})
        )
        name = type(model).__name__
        if not isinstance(inputs, dict):
            return f"inputs of {type(self.engine.task).__name__} gives no dict"
        if self.own:
            taught = (type(module) for module in model.modules() if isinstance(module, Attention))
            own = [kind.__name__ for kind in taught if "key_values" not in inspect.signature(kind.forward).parameters]
            return f"forward of {own[0]} does not take key_values" if own else ""
        if not all(each in self.names for each in HUGGING_FACES):
            return f"forward of {name} does not take {', '.join(OWN)}"
        if getattr(model, "_is_stateful", False) or not inputs.keys() <= INPUTS:
            return f"{name} keeps more than keys, or is given more than tokens and positions"
        return ""

    @property
    def own(self) -> bool:
        """Whether the model is given a `KeyValues`."""
        return all(each in self.names for each in OWN)

    def _try(self, rows: list[list[int]], expected: Tensor | None) -> None:
        """Keep keys of all tokens but the last ones, and see that those then give what they gave in whole rows."""
        assert expected is not None
        self.kept = KeptKeys(self, [row[:-1] for row in rows])
        if not (why := self.kept.why):
            off = (self.kept.longer(rows) - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
            alike = float(off.max()) <= TOLERANCE.get(expected.dtype, HALF)
            why = "" if alike else f"it gives something else with them (relative difference {float(off.max()):.1e})"
        found = [words[0] for words in self.engine.mesh.world.all_gather_words([why])]
        self.why, self.tried = next((each for each in found if each), ""), True
        self._say()

    def _say(self) -> None:
        if self.why and self.engine.is_main:
            _say(type(self.engine.spread.model).__name__, self.why)


class KeptKeys:
    """Rows padded on the left, and what attention keeps of their tokens."""

    def __init__(self, maker: NextTokens, rows: list[list[int]]) -> None:
        self.maker, self.device = maker, maker.engine.device
        longest = max(map(len, rows))
        tokens, places = torch.full((len(rows), longest), maker.questions.pad), torch.zeros(len(rows), longest).long()
        self.real = torch.zeros_like(places)
        for number, row in enumerate(rows):
            tokens[number, -len(row) :], places[number, -len(row) :] = torch.tensor(row), torch.arange(len(row))
            self.real[number, -len(row) :] = 1
        self.past: Any = KeyValues() if maker.own else None
        self.logits = self._forward(tokens, places, self.real)
        """After each row."""
        self.why = "" if self.past is not None else "it gives no past_key_values"

    def longer(self, rows: list[list[int]]) -> Tensor:
        """Logits after rows that are a token longer; of one that is as it was, nobody asks for them."""
        tokens, places = torch.tensor([row[-1:] for row in rows]), torch.tensor([[len(row) - 1] for row in rows])
        self.real = torch.cat([self.real, torch.ones_like(tokens)], dim=1)
        return self._forward(tokens, places, torch.ones_like(tokens))

    def _forward(self, tokens: Tensor, places: Tensor, real: Tensor) -> Tensor:
        more: dict[str, Any]
        documents = real - 1
        if self.maker.own:
            more = {"positions": places, "documents": documents, "key_values": self.past}
        else:
            known = {"position_ids": places, "logits_to_keep": 1}
            more = {name: value for name, value in known.items() if name in self.maker.names}
            more |= {"attention_mask": self.real, "past_key_values": self.past, "use_cache": True}
        more = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in more.items()}
        logits, past = self.maker.forward(tokens, places, documents, more)
        assert logits is not None
        self.past = self.past if self.maker.own else past
        return logits[:, -1]


@cache
def _say(model: str, why: str) -> None:
    """Said once."""
    warnings.warn(f"{model} answers without kept keys, a whole forward for each token: {why}", stacklevel=3)
