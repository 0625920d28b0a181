"""The Layout: how a task is spread, as one frozen value with one text form, ``dp=2,fsdp=4,zero=2``.

It knows nothing of the model. `check` holds it against a task's batch and a world size, and every refusal names the
numbers and the nearest layout that works.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any, get_type_hints

from phalanx.comm import EXACT, FEWEST, Comm
from phalanx.errors import WrongUse, closest
from phalanx.local_updates import LocalUpdates

DEGREES = ("dp", "fsdp", "tp", "cp", "pp", "ep")
MOST_RANKS = 1 << 20
CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": ("gpipe", "1f1b", "interleaved", "zb"),
    "cp_kind": ("gather", "ulysses"),
    "recompute": ("none", "selective", "full", "host"),
    "offload": ("none", "optimizer", "params"),
    "compile": ("none", "blocks"),
    "graphs": ("none", "step"),
    "activations": (EXACT, "bf16", "fp8"),
}
CHUNKS = {"interleaved": 2}
"""By pipeline schedule: stages a rank has, where they are more than one."""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism and how memory and time are traded."""

    dp: int = 1
    """Replicas: each holds all that its ``fsdp`` group shards, and gradients are summed over them."""
    fsdp: int = 1
    """Ranks that share one copy of the training state, as ``zero`` says."""
    tp: int = 1
    """Ranks that share each layer: some heads, some hidden features, some of the vocabulary."""
    cp: int = 1
    """Ranks that share each sequence: some of its positions."""
    pp: int = 1
    """Ranks that share the blocks: each computes some and hands the stream on, as ``schedule`` says."""
    ep: int = 1
    """Ranks within ``fsdp x cp`` that share the experts: each has some, and tokens travel to them."""
    zero: int = 3
    """What an ``fsdp`` group shards: 1 optimizer state, 2 also gradients, 3 also weights."""
    schedule: str = "1f1b"
    cp_kind: str = "gather"
    """How ``cp`` computes attention: with everybody's keys and values, or by exchanging heads for time."""
    micro_batch: int | None = None
    """Samples a rank computes at once; None: its whole share of the global batch."""
    exact: int = 0
    """Virtual micro-batches a step is cut into, whoever computes them, so that any number of ranks gives the same bits;
    a power of two, or 0 where sums may depend on the ranks."""
    recompute: str = "none"
    offload: str = "none"
    offload_percent: int = 100
    """How much of the weights ``offload`` takes, the first blocks' first; what stays needs no way to the device."""
    compile: str = "none"
    graphs: str = "none"
    """Whether forward and backward of a step are recorded as a CUDA graph, and replayed."""
    comm: str = EXACT
    """How gradients travel: as they are, or in few bits over `coded_axis`; or how sites update by themselves."""
    activations: str = EXACT
    """How the stream travels between stages of ``pp`` and tokens to experts of ``ep``, and gradients of both."""

    def __post_init__(self) -> None:
        for name in (*DEGREES, "zero", "micro_batch", "offload_percent"):
            value = getattr(self, name)
            if value is None and name == "micro_batch":
                continue
            if type(value) is not int or value < 1:
                usual = 50 if name == "offload_percent" else 2
                raise WrongUse(
                    f"{name}={value} in a layout is not a whole number from 1 up. Give one, e.g. {name}={usual}."
                )
        if type(self.exact) is not int or self.exact < 0 or self.exact & (self.exact - 1):
            raise WrongUse(
                f"exact={self.exact} in a layout is no power of two, and sums are made in pairs. Give one, e.g. "
                "exact=8, or leave it out."
            )
        if self.zero > 3:
            raise WrongUse(f"zero={self.zero} is not a ZeRO stage. Choose zero=1, zero=2 or zero=3.")
        if self.offload_percent > 100:
            raise WrongUse(f"offload_percent={self.offload_percent} is more than all. Choose from 1 to 100.")
        if self.offload == "none" and self.offload_percent != 100:
            raise WrongUse(
                f"offload_percent={self.offload_percent} says how much, and not what. Add offload=optimizer or "
                "offload=params, or leave it out."
            )
        for name, known in CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                raise WrongUse(f"{name}={value} is not known in a layout; {closest(str(value), known)}")
        Comm.parse(self.comm)

    def __str__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ",".join(parts) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read the text form: ``Layout.parse(str(layout)) == layout``."""
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not equals or not value:
                raise WrongUse(
                    f"{part!r} in the layout {text!r} is not name=value. Write it like fsdp=4,micro_batch=2."
                )
            if name not in hints:
                raise WrongUse(f"{name!r} is not part of a layout; {closest(name, hints)}")
            if name in values:
                raise WrongUse(f"{name} stands twice in the layout {text!r}. Give it once.")
            values[name] = value if hints[name] is str else _whole(name, value)
        if not values:
            raise WrongUse("the layout is empty. Give at least one degree, e.g. dp=2.")
        return cls(**values)

    @property
    def world(self) -> int:
        """Ranks this layout needs. Experts live inside ``fsdp x cp``, so ``ep`` adds none."""
        return self.dp * self.fsdp * self.tp * self.cp * self.pp

    @property
    def batch_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.dp * self.fsdp

    @property
    def stages(self) -> int:
        """Stages of the pipeline: as many as ranks, or more where the schedule gives each rank several."""
        return self.pp * CHUNKS.get(self.schedule, 1) if self.pp > 1 else 1

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches a step is cut into; the same number on every rank."""
        if self.exact:
            return self.exact // self.batch_ranks
        share = math.ceil(global_batch / self.batch_ranks)
        return math.ceil(share / (self.micro_batch or share))

    @property
    def sums_each_micro_batch(self) -> bool:
        """Whether gradients are summed over ``fsdp`` after each micro-batch, or stay whole until the last."""
        return self.zero > 1 and self.fsdp * self.cp > 1

    @property
    def coded_axis(self) -> str:
        """The axis over which gradients travel in few bits: the one whose ranks are further apart; none if empty."""
        if self.comm == EXACT or self.batch_ranks == 1 or self.local is not None:
            return ""
        return "dp" if self.dp > 1 else "fsdp"

    @property
    def local(self) -> LocalUpdates | None:
        """How sites, the ranks with one index along ``dp``, train by themselves, if they do."""
        return LocalUpdates.parse(self.comm)

    @property
    def site(self) -> Layout:
        """How one of them is spread; all of it, where there are none."""
        return replace(self, dp=1, comm=EXACT) if self.local else self

    def leaves(self, batch_rank: int) -> list[int]:
        """The virtual micro-batches that a rank computes, in order, so that every sum it takes part in is a node.

        Replicas have runs of them. Within those, ranks of ``fsdp`` do neighbours at the same time where they sum each
        micro-batch, and otherwise have runs of their own.
        """
        replica, shard = divmod(batch_rank, self.fsdp)
        each = self.exact // self.batch_ranks
        first = replica * each * self.fsdp
        if self.sums_each_micro_batch:
            return [first + micro * self.fsdp + shard for micro in range(each)]
        return [first + shard * each + micro for micro in range(each)]

    def exactly(self, global_batch: int) -> Layout:
        """This layout with exact sums: as many virtual micro-batches as 8 ranks need, or more ranks have."""
        if self.exact:
            return self
        return replace(self, exact=_power_of_two(min(global_batch, max(8, self.batch_ranks))))

    def check(self, global_batch: int, world: int) -> None:
        """Refuse, with the numbers and the nearest layout that works, what this task and world size cannot do."""
        if max(world, self.world) > MOST_RANKS:
            raise WrongUse(f"{max(world, self.world):,} ranks are more than can be, {MOST_RANKS:,}. Ask for fewer.")
        for problem in self._problems(global_batch, world):
            near = self._nearest(global_batch, world)
            raise WrongUse(f"{problem}. The nearest layout that works: {near}")

    def idle(self, micro_batches: int) -> float:
        """The share of the time that a pipeline's ranks wait: to fill it, and to drain it."""
        filling = (self.pp - 1) / {"interleaved": 2, "zb": 3}.get(self.schedule, 1)
        return filling / (micro_batches + filling)

    def _problems(self, global_batch: int, world: int) -> Iterator[str]:
        if (self.fsdp * self.cp) % self.ep:
            yield f"ep={self.ep} does not divide fsdp={self.fsdp} x cp={self.cp}, within which experts are spread"
        if self.world != world:
            degrees = " x ".join(f"{n}={getattr(self, n)}" for n in DEGREES[:5] if getattr(self, n) > 1) or "dp=1"
            yield f"{degrees} needs {self.world} ranks and there are {world}"
        if global_batch < self.batch_ranks:
            yield (
                f"global_batch={global_batch} is less than the {self.batch_ranks} ranks of "
                f"dp={self.dp} x fsdp={self.fsdp}: some would never see a sample"
            )
        yield from self._not_exact(global_batch)
        yield from self._not_coded()
        yield from self._not_recorded()
        share, over = math.ceil(global_batch / self.batch_ranks), f"global_batch={global_batch} over {self.batch_ranks}"
        if self.micro_batch is not None and self.micro_batch > share:
            yield f"micro_batch={self.micro_batch} is more than a rank's share of {share} ({over})"

    def _not_exact(self, global_batch: int) -> Iterator[str]:
        if not self.exact:
            return
        text = f"exact={self.exact}"
        for name in ("tp", "cp", "pp", "ep"):
            degree = getattr(self, name)
            if degree > 1:
                yield f"{text} is not offered with {name}={degree}, which cuts sums inside of layers"
        if self.compile != "none":
            yield f"{text} is not offered with compile={self.compile}, whose kernels depend on what ran before"
        if self.comm != EXACT:
            how = "has sites train by themselves" if self.local else "rounds what ranks send"
            yield f"{text} is not offered with comm={self.comm}, which {how}"
        if self.micro_batch is not None:
            yield f"{text} cuts a step into micro-batches, and so would micro_batch={self.micro_batch}"
        if self.exact > global_batch:
            yield f"{text} virtual micro-batches are more than the samples of global_batch={global_batch}"
        if self.exact % self.batch_ranks:
            yield (
                f"the {self.batch_ranks} ranks of dp={self.dp} x fsdp={self.fsdp} are not a power of two that divides "
                f"{text}, so they cannot share its virtual micro-batches"
            )

    def _not_coded(self) -> Iterator[str]:
        if self.local is not None and self.dp == 1:
            yield f"comm={self.comm} is for replicas that train by themselves, and dp=1 is one alone"
        method = Comm.parse(self.comm)
        if method is None or self.coded_axis != "fsdp":
            return
        if self._codes_replicas_alone:
            yield f"comm={self.comm} sums over replicas alone, and dp=1"
        for name in ("cp", "ep"):
            if getattr(self, name) > 1:
                yield f"comm={self.comm} over fsdp is not offered with {name}={getattr(self, name)}"

    @property
    def _codes_replicas_alone(self) -> bool:
        """Whether ``comm`` is for replicas alone, and there are none."""
        method = Comm.parse(self.comm)
        return method is not None and not method.sharding and self.coded_axis == "fsdp"

    def _not_recorded(self) -> Iterator[str]:
        if self.graphs == "none":
            return
        reasons = {
            "pp": "whose stages wait for each other by messages", "exact": "which keeps partial sums in turns",
            "recompute": "which has memory of the host on its way",
            "offload": "which has memory of the host on its way",
            "comm": "which has sites agree" if self.local else "which keeps what it owes in two places in turn",
        }  # fmt: skip
        method = Comm.parse(self.comm)
        refused = {
            "pp": self.pp > 1, "exact": bool(self.exact), "recompute": self.recompute == "host",
            "offload": self.offload == "params", "comm": bool(self.local or (method and method.owes)),
        }  # fmt: skip
        for name, why in reasons.items():
            if refused[name]:
                yield f"graphs={self.graphs} is not offered with {name}={getattr(self, name)}, {why}"

    def _nearest(self, global_batch: int, world: int) -> str:
        """The closest valid layout over the same world, or over the largest world that can work."""
        for size in range(min(world, global_batch * self.tp * self.cp * self.pp), 0, -1):
            for best in self.fitted(global_batch, size, cut_otherwise=True):
                return f"{best}" + ("" if size == world else f" on {size} ranks")
        raise AssertionError("dp=1 always works")

    def fitted(self, global_batch: int, world: int, cut_otherwise: bool = False) -> list[Layout]:
        """Layouts for so many ranks that keep what they can of this one, the closest first.

        ``cut_otherwise``: also those that cut the model into more or fewer parts, which not every model can be.
        """
        cuts = [_near(getattr(self, n), world) if cut_otherwise else {getattr(self, n), 1} for n in DEGREES[2:]]
        options = {
            replace(self, dp=dp, fsdp=rest // dp, tp=tp, cp=cp, pp=pp, ep=ep, **micro, **switches)
            for tp, cp, pp, ep in product(*cuts)
            if world % (tp * cp * pp) == 0
            for rest in [world // (tp * cp * pp)]
            if rest <= global_batch and not (self.exact and rest & (rest - 1))  # as exact sums need powers of two
            for dp in _divisors(rest)
            for micro in ({"micro_batch": self.micro_batch}, self._fitting(global_batch, rest))
            for switches in self._switches()
        }
        valid = [option for option in options if not any(option._problems(global_batch, world))]
        return sorted(valid, key=lambda option: (self._distance(option), str(option)))

    def _switches(self) -> list[dict[str, Any]]:
        """Ways to leave out what another layout may not be offered with."""
        without = {"compile": ["none"], "graphs": ["none"], "comm": [FEWEST] * self._codes_replicas_alone + [EXACT]}
        kinds = [dict.fromkeys([getattr(self, name), *others]) for name, others in without.items()]
        return [dict(zip(without, values, strict=True)) for values in product(*kinds)]

    def _fitting(self, global_batch: int, ranks: int) -> dict[str, Any]:
        """Micro-batches that fit so many batch ranks."""
        if self.exact:
            return {"micro_batch": None, "exact": _power_of_two(min(global_batch, max(ranks, self.exact)))}
        return {"micro_batch": self.micro_batch and min(self.micro_batch, math.ceil(global_batch / ranks))}

    def _distance(self, other: Layout) -> tuple[float | bool, ...]:
        kept = DEGREES[1 if self.local else 2 :]  # dp and fsdp stand in for each other, but a site stays as it is
        weights = dict.fromkeys(kept, 3)
        far = sum(weights.get(n, 1) * abs(math.log2(getattr(self, n) / getattr(other, n))) for n in DEGREES)
        added = sum(getattr(self, n) == 1 < getattr(other, n) for n in DEGREES)
        names = "compile", "graphs", "comm", "micro_batch", "exact"
        changed = (getattr(self, name) != getattr(other, name) for name in names)
        return far, added, *changed, self.comm != EXACT and other.comm == EXACT


def _near(degree: int, world: int) -> set[int]:
    """It, none, and where it is one at all, the next less and the next more that divide so many ranks."""
    others = _divisors(world) if degree > 1 else []
    return {degree, 1, *[n for n in others if n <= degree][-1:], *[n for n in others if n >= degree][:1]}


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _power_of_two(most: int) -> int:
    """The largest that is no more than this."""
    return 1 << (most.bit_length() - 1)


def _whole(name: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise WrongUse(f"{name}={value} in a layout is not a whole number. Give one, e.g. {name}=2.") from None
