"""What ``--profile`` asks for: some steps on some ranks, the modules of one step, or ranges for Nsight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.errors import WrongUse
from phalanx.events import writers
from phalanx.words import digits, many

HOW = "Write it like --profile 10:12, 10:12@0,3, 10:12@0-3, 10:12@all, modules, modules@5 or nvtx."
MOST_STEPS = 100
"""In one trace: of more, nothing could open it."""
MOST_RANKS = 8
"""That are profiled where none are named."""
MODULES_STEP = 3


@dataclass(frozen=True)
class ProfileRequest:
    """Steps count from 1, as the progress line counts them, and ``last`` is one of them."""

    text: str
    kind: str
    """``steps``, ``modules`` or ``nvtx``."""
    first: int = 1
    last: int = 1
    ranks: tuple[int, ...] | None = None
    """None: as `chosen` says."""
    every: bool = False
    """``@all`` ranks."""

    @classmethod
    def parse(cls, text: str) -> ProfileRequest:
        """From the words of the command line."""
        what, at, rest = text.partition("@")
        if at and not rest:
            raise _refused(text, "ends in @ and names nothing")
        if what == "nvtx" and not at:
            return cls(text, "nvtx")
        if what == "modules":
            step = digits(rest) if at else MODULES_STEP
            if step is None:
                raise _refused(text, f"names no step after the @: {rest!r}")
            if step < 2:
                raise WrongUse(
                    f"--profile {text}: FLOPs are counted in the step before, and step {step} has none. Give a step "
                    "from 2 on, such as modules@3."
                )
            return cls(text, "modules", step, step)
        first, colon, last = what.partition(":")
        begin, end = digits(first), digits(last if colon else first)
        if begin is None or end is None:
            raise _refused(text, f"has no steps: {what!r} is not two numbers")
        if begin < 1:
            raise WrongUse(f"--profile {text}: steps count from 1. Begin with 1 or more.")
        if end < begin:
            raise WrongUse(f"--profile {text} ends before it begins. Give the first step first: {end}:{begin}.")
        if end - begin >= MOST_STEPS:
            raise WrongUse(
                f"--profile {text} asks for {many(end - begin + 1, 'step')}: nothing opens a trace of so many. Give at "
                f"most {MOST_STEPS}; 3 mostly show all there is to see."
            )
        if not at or rest == "all":
            return cls(text, "steps", begin, end, every=bool(at))
        return cls(text, "steps", begin, end, _ranks(text, rest))

    @property
    def name(self) -> str:
        """Of its files."""
        return "modules" if self.kind == "modules" else f"steps-{self.first}-{self.last}"

    @property
    def told(self) -> str:
        return f"step {self.first}" if self.first == self.last else f"steps {self.first} to {self.last}"

    def check(self, world: int, steps: int) -> None:
        """Refuse what so many ranks and steps do not have."""
        if self.kind != "nvtx" and self.last > steps:
            have = f"the last is step {steps}" if steps else "the task has none"
            raise WrongUse(f"--profile {self.text} is beyond the end: {have}. Give steps up to that, or more --steps.")
        wrong = [rank for rank in self.ranks or () if rank >= world]
        if wrong:
            only = "there is rank 0 alone" if world == 1 else f"there are ranks 0 to {world - 1}"
            raise WrongUse(f"--profile {self.text} names rank {wrong[0]}, and {only}. Name some of these, or @all.")

    def check_device(self, device: str) -> None:
        """Refuse what only a GPU has, where ranks compute on something else."""
        if self.kind == "nvtx" and device != "cuda":
            raise WrongUse("--profile nvtx makes ranges for Nsight, and ranks compute on no GPU here. Leave it out.")

    def chosen(self, hosts: Sequence[int]) -> list[int]:
        """The ranks that are profiled, given the host of each: those named, or up to 8: all, or the first of hosts."""
        if self.ranks is not None:
            return [rank for rank in self.ranks if rank < len(hosts)]
        if self.every or self.kind == "modules" or len(hosts) <= MOST_RANKS:
            return list(range(len(hosts)))
        return writers(hosts)[:MOST_RANKS]


def _ranks(text: str, words: str) -> tuple[int, ...]:
    found: set[int] = set()
    for word in words.split(","):
        first, dash, last = word.partition("-")
        begin, end = digits(first), digits(last if dash else first)
        if begin is None or end is None or end < begin:
            raise _refused(text, f"names no ranks with {word!r}")
        if end - begin > 1 << 16:
            raise _refused(text, f"names too many ranks with {word!r}")
        found |= set(range(begin, end + 1))
    return tuple(sorted(found))


def _refused(text: str, why: str) -> WrongUse:
    return WrongUse(f"--profile {text} {why}. {HOW}")
