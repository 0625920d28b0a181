"""Local updates: a layout's ``comm`` where sites train by themselves, and agree every so many steps. Read from text.

local:16                                  16 steps of each site alone, then the mean of their weights
diloco:16                                 the same, and the mean of what they changed is a step of an outer optimizer
diloco:16:int4:fragments=4:overlap=2      in 4 bits, a quarter of the model at a time, while two more steps compute
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from phalanx.errors import WrongUse, closest
from phalanx.words import many

METHODS = ("local", "diloco")
CODECS = ("bf16", "int8", "int4")
OPTIONS = {"fragments": int, "overlap": int, "rate": float, "momentum": float}
RATE, MOMENTUM = 0.9, 0.2
"""Of the outer optimizer. The literature's 0.7 and 0.9 are for sites that agree every few hundred steps."""
RETIRED = {"mix": "what a site changes while weights travel is added to what arrives, whole"}
"""Options of saved runs that nothing is done with any more, and why."""
EXAMPLE = "diloco:16:int4:fragments=4:overlap=2"


@dataclass(frozen=True)
class LocalUpdates:
    """How sites, which are the replicas along ``dp``, train alone and agree."""

    method: str
    every: int
    """Steps from one time that all weights agree to the next."""
    codec: str = ""
    """How what a site has changed travels; nothing: as it is."""
    fragments: int = 1
    """Parts of the model, which are agreed on in turn, evenly over these steps."""
    overlap: int = 0
    """Steps that are trained while a fragment travels: what comes back is that much older, and what a site has changed
    meanwhile is added to it."""
    rate: float | None = None
    momentum: float | None = None
    """Of the outer optimizer, Nesterov's, if not the usual."""

    @classmethod
    def parse(cls, text: str) -> LocalUpdates | None:
        """Read the text form; None where it means something else."""
        method, *words = text.split(":")
        if method not in METHODS:
            return None
        if not words or not words[0].isdecimal() or not int(words[0]):
            raise _wrong(text, "must say after how many steps sites agree, 1 or more", f"{method}:16")
        found = cls(method, int(words[0]))
        for word in words[1:]:
            found = found._with(text, word)
        return found._checked(text)

    def _with(self, text: str, word: str) -> LocalUpdates:
        name, equals, value = word.partition("=")
        if not equals:
            if name not in CODECS or self.codec:
                known = ", ".join([*CODECS, *(f"{option}=..." for option in OPTIONS)])
                raise _wrong(text, f"has {word!r}, which is none of {known}, or twice a codec", EXAMPLE)
            return replace(self, codec=name)
        if name not in OPTIONS and name not in RETIRED:
            raise WrongUse(f"{name!r} is no part of comm={text}; {closest(name, OPTIONS)}")
        try:
            number = OPTIONS.get(name, float)(value)
        except ValueError:
            raise _wrong(text, f"has {word}, which is no number", EXAMPLE) from None
        return self if name in RETIRED else replace(self, **{name: number})

    def _checked(self, text: str) -> LocalUpdates:
        if not 1 <= self.fragments <= self.every:
            raise _wrong(text, f"cannot agree on {self.fragments} fragments in {self.every} steps", EXAMPLE)
        if self.overlap < 0:
            raise _wrong(text, f"has {self.overlap} steps for a fragment to come back", EXAMPLE)
        if self.overlap >= self.every // self.fragments:
            most = self.every // self.fragments - 1
            raise _wrong(
                text, f"has a fragment come back after {self.overlap} steps, and the next leaves before that",
                f"overlap={most}" if most else str(replace(self, every=self.fragments * (self.overlap + 1))),
            )  # fmt: skip
        if self.method == "local" and (self.rate is not None or self.momentum is not None):
            raise _wrong(text, "takes the mean of weights, which has no rate or momentum", f"diloco:{self.every}")
        if self.rate is not None and not 0 < self.rate <= 2:
            raise _wrong(text, "has an outer rate that is not above 0 and at most 2", "rate=0.7")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise _wrong(text, "has an outer momentum that is not from 0 to below 1", "momentum=0.6")
        return self

    def __str__(self) -> str:
        options = [f"{n}={v:g}" for n in OPTIONS if (v := getattr(self, n)) != getattr(LocalUpdates, n)]
        return ":".join([self.method, str(self.every), *filter(None, [self.codec]), *options])

    @property
    def apart(self) -> bool:
        """Whether sites always have weights of their own, since no two fragments agree at the same time."""
        return self.fragments > 1 or self.overlap > 0

    @property
    def outer(self) -> tuple[float, float]:
        """Rate and momentum of the outer optimizer."""
        if self.method == "local":
            return 1.0, 0.0
        return RATE if self.rate is None else self.rate, MOMENTUM if self.momentum is None else self.momentum

    def note(self, text: str, sites: int) -> str:
        """What a run's first lines say of it."""
        how = f"a fragment of {self.fragments} at a time" if self.fragments > 1 else "on all weights at once"
        late = f", {many(self.overlap, 'step')} late" if self.overlap else ""
        agree = f"they agree {how}{late}, every {self.every} steps"
        agree += "".join(f" ({why})" for why in retired(text))
        return (
            f"comm={text} has {sites} sites train by themselves; {agree}. A step's loss and tokens are the first one's"
        )

    def arriving(self, step: int) -> int | None:
        """The fragment that is agreed on after so many steps, if one is."""
        place = (step - 1) % self.every + 1
        return next((n for n in range(self.fragments) if (n + 1) * self.every // self.fragments == place), None)

    def leaving(self, step: int) -> int | None:
        """The fragment that begins to travel after so many steps, if one does."""
        return self.arriving(step + self.overlap)

    def divided(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """The fragment that each weight is in: runs of about the same size, in the model's order."""
        total, before, found = max(1, sum(sizes.values())), 0, {}
        for name, size in sizes.items():
            found[name] = min(self.fragments - 1, (2 * before + size) * self.fragments // (2 * total))
            before += size
        return found

    def is_boundary(self, step: int) -> bool:
        """Whether all fragments have been agreed on after so many steps, and none travels."""
        return step % self.every == 0

    def since(self, step: int) -> range:
        """The steps from the last boundary before this one, up to this one."""
        return range((step - 1) // self.every * self.every + 1, step + 1)

    def shortened(self) -> LocalUpdates:
        """The same in as few steps as can be: what a proof runs."""
        fragments, overlap = min(2, self.fragments), min(1, self.overlap)
        return replace(
            self, every=min(self.every, max(2, fragments * (overlap + 1))), fragments=fragments, overlap=overlap
        )


def retired(text: str) -> list[str]:
    """What is said of options that nothing is done with any more."""
    return [f"{name} is no more: {why}" for name, why in RETIRED.items() if f":{name}=" in text]


def _wrong(text: str, why: str, instead: str) -> WrongUse:
    return WrongUse(f"comm={text} {why}. Write e.g. {instead}.")
