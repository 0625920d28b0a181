"""Learning-rate schedules by name: a factor on the learning rate as a pure function of the step.

One is written as its name, with options if it has some: ``cosine``, ``wsd:decay=0.1,shape=sqrt``. All begin with a
linear warm-up of so many steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from phalanx.errors import WrongUse, closest

Option = float | str
Options = Mapping[str, Option]
SHAPES = ("linear", "sqrt")


@dataclass(frozen=True)
class StepPlace:
    """Where a step is: its number, of so many, of which the first are the warm-up."""

    step: int
    warmup: int
    steps: int

    @property
    def done(self) -> float:
        """How much of the steps after the warm-up, from 0 to 1."""
        return min(1.0, (self.step - self.warmup) / max(1, self.steps - self.warmup))


@dataclass(frozen=True)
class ScheduleKind:
    """A schedule after its warm-up."""

    after: Callable[[StepPlace, Options], float]
    options: Options
    """What may be given, and what it is without."""


def _number(options: Options, name: str) -> float:
    return float(options[name])


def _between(share: float, options: Options) -> float:
    """From the end's factor (a share of 0) to 1."""
    end = _number(options, "end")
    return end + (1 - end) * share


def _half_wave(done: float, options: Options) -> float:
    end = _number(options, "end")
    return end + (1 - end) / 2 * (1 + math.cos(math.pi * done))


def _restarts(place: StepPlace, options: Options) -> float:
    return _half_wave(1.0 if place.done >= 1 else place.done * _number(options, "cycles") % 1.0, options)


def _stable_then_decay(place: StepPlace, options: Options) -> float:
    falls = max(1, round(_number(options, "decay") * place.steps))
    first = max(place.warmup, place.steps - falls)
    part = min(1.0, max(0, place.step - first) / max(1, place.steps - first))
    return _between(1 - (math.sqrt(part) if options["shape"] == "sqrt" else part), options)


def _inverse_root(place: StepPlace, options: Options) -> float:
    return math.sqrt(max(1, place.warmup) / (place.step + 1))


def _power(place: StepPlace, options: Options) -> float:
    return _between((1 - place.done) ** _number(options, "power"), options)


KINDS: Mapping[str, ScheduleKind] = {
    "cosine": ScheduleKind(lambda place, options: _half_wave(place.done, options), {"end": 0.1}),
    "linear": ScheduleKind(lambda place, options: _between(1 - place.done, options), {"end": 0.0}),
    "constant": ScheduleKind(lambda place, options: 1.0, {}),
    "wsd": ScheduleKind(_stable_then_decay, {"decay": 0.2, "shape": "linear", "end": 0.1}),
    "inverse_sqrt": ScheduleKind(_inverse_root, {}),
    "polynomial": ScheduleKind(_power, {"power": 2.0, "end": 0.0}),
    "restarts": ScheduleKind(_restarts, {"cycles": 4.0, "end": 0.0}),
    "plateau": ScheduleKind(
        lambda place, options: 1.0,
        {"measure": "loss", "factor": 0.1, "patience": 10.0, "cooldown": 0.0, "min_delta": 0.0, "end": 0.0},
    ),  # constant here: a callback of that name reduces it where a measure of the held-out data does not improve
}


def parsed(text: str) -> tuple[str, dict[str, Option]]:
    """A schedule's name and all of its options; refused where it is none."""
    if not isinstance(text, str):
        raise WrongUse(f"rate={text!r} is no schedule. Choose one of: {', '.join(KINDS)}.")
    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise WrongUse(f"rate={text} is no schedule; {closest(name, KINDS)}")
    known = KINDS[name].options
    found = dict(known)
    for item in filter(None, rest.split(",")):
        option, equals, value = item.partition("=")
        if option not in known or not equals:
            allowed = ", ".join(f"{each}={value}" for each, value in known.items()) or "no options"
            raise WrongUse(f"rate={text}: {item!r} is no option of {name}. It takes {allowed}.")
        found[option] = _option(text, option, value)
    return name, found


BOUNDS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "end": (lambda value: 0 <= value <= 1, "a share of the learning rate, from 0 to 1"),
    "decay": (lambda value: 0 < value <= 1, "a share of all steps, above 0 and at most 1"),
    "power": (lambda value: 0 < value < math.inf, "a number above 0"),
    "cycles": (lambda value: value >= 1 and value == int(value), "a whole number from 1 on"),
    "factor": (lambda value: 0 < value < 1, "a number between 0 and 1"),
    "patience": (lambda value: value >= 0 and value == int(value), "a whole number from 0 on"),
    "cooldown": (lambda value: value >= 0 and value == int(value), "a whole number from 0 on"),
    "min_delta": (lambda value: value >= 0, "a number from 0 on"),
}


def _option(text: str, option: str, value: str) -> Option:
    if option == "shape":
        if value not in SHAPES:
            raise WrongUse(f"rate={text}: shape={value} is not known. Choose one of: {', '.join(SHAPES)}.")
        return value
    if option == "measure":
        return value
    allowed, words = BOUNDS[option]
    try:
        number = float(value)
        if not math.isfinite(number) or not allowed(number):
            raise ValueError
    except ValueError:
        raise WrongUse(f"rate={text}: {option}={value} is not {words}. Give {option} such a value.") from None
    return number


def schedule(text: str, steps: int, warmup_steps: int, first: int = 0) -> Callable[[int], float]:
    """The factor of each step of a run of so many. ``first``: the step that it begins with; the factor is 0 before."""
    name, options = parsed(text)
    kind = KINDS[name]

    def factor(step: int) -> float:
        place = StepPlace(step - first, warmup_steps, steps - first)
        if place.step < 0:
            return 0.0
        return (place.step + 1) / warmup_steps if place.step < warmup_steps else kind.after(place, options)

    return factor
