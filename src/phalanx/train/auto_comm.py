"""``comm=auto``: how gradients travel, chosen by what a run measures, and chosen again when that changes.

What was chosen is held to what steps then take, and it is chosen again by that: a method that makes them longer than
they were is left, and so is one that does not hide as much as was predicted, where another might.

Every rank tells its seconds with a step's one small sum, so all of them decide alike and nothing more is sent. The link
is measured before the first choice, when steps become longer, and otherwise so rarely that it takes a hundredth of the
time.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from phalanx.comm import AUTO, EXACT
from phalanx.comm_methods import allowed
from phalanx.parallel.communication import links
from phalanx.parallel.communication.choosing import Conditions, Experience, MethodTrial, choose
from phalanx.parallel.communication.codecs import speed
from phalanx.parallel.communication.codecs.switched import Switched
from phalanx.parallel.communication.mesh import SHARD
from phalanx.train.comm_work import over_replicas, over_shards

if TYPE_CHECKING:
    from phalanx.train.engine import Engine
    from phalanx.train.step import Metrics

FIRST, LAST = 3, 8
"""As few steps, and as many, that a choice looks back on."""
TOLD = 4
"""Numbers that a rank tells of its last step: its seconds, and whether the link is to be measured again."""
SLOWER, IN_A_ROW = 1.3, 3
"""So many steps in a row, each so many times as long as those before: the link is measured again."""
SHARE = 0.01
"""Of the time that measuring may take."""
LEAST_STEPS = 20
"""Between two measurements of a link that seems as it was."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of a step, a mean over all ranks."""

    whole: float
    exposed: float
    """Of these it waited for gradients, and over shards for weights."""
    hides: float
    """Of these something may travel: backward, and where weights are gathered, forward too."""

    @classmethod
    def of(cls, metrics: Metrics, axis: str) -> StepSeconds:
        seconds = metrics.seconds
        exposed = metrics.communication.get(f"exposed_{axis}", 0.0)
        hides = seconds.get("backward", 0.0) + (seconds.get("forward", 0.0) if axis == "fsdp" else 0.0)
        return cls(sum(seconds.values()) - seconds.get("data", 0.0), exposed, hides)


@dataclass(frozen=True)
class Chosen:
    """What was chosen, and why."""

    step: int
    method: str
    before: str
    why: str
    predicted: dict[str, float] = field(default_factory=dict)
    """Seconds of a step, by method, where it was chosen by them."""
    megabits: float | None = None
    """A second, that a rank can send, where that was measured."""
    latency: float | None = None

    def __str__(self) -> str:
        return f"   comm  {self.method} from step {self.step + 1} on: {self.why}"


class AutoComm:
    """Of one rank; all of them do the same."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.methods, self.method = engine, allowed(engine.loss_tolerance), EXACT
        self.active = engine.layout.comm == AUTO and bool(engine.layout.coded_axis)
        sharded = self.active and engine.layout.coded_axis == "fsdp"
        self.group = engine.mesh.group(*SHARD) if sharded else engine.mesh.group("dp")
        buckets = engine.spread.buckets if self.active else ()
        coded = [bucket.coded for bucket in buckets if bucket.coded is not None]
        self.codecs = list(dict.fromkeys(each.method for each in coded if isinstance(each.method, Switched)))
        self.work = (over_shards if sharded else over_replicas)(engine, coded)
        self.told = [0.0] * TOLD if self.active else []
        """Of this rank's last step, for the next one's sum."""
        self.news: deque[Chosen] = deque()
        """What was chosen, until somebody tells it."""
        self._steps: deque[StepSeconds] = deque(maxlen=LAST)
        self._compute, self._hides = 0.0, 0.0
        self._left_out, self._slow, self._since = 2, 0, 0
        """Steps that are not looked back on; that were longer, in a row; since the last choice."""
        self._longer: list[float] = []
        """Seconds of those that were longer."""
        self._due, self._follows = False, False
        self._trial: MethodTrial | None = None
        self._experience = Experience()
        self._speed: links.Speed | None = None
        self._measured_at, self._cost = time.monotonic(), 0.0
        self._codec_seconds: dict[str, float] = {}

    def agreed(self, numbers: list[float]) -> list[float]:
        """Take what all ranks told of the step before, summed, off the end of a step's agreed numbers."""
        if self.active:
            self._look(numbers[-TOLD:])
        return numbers[: len(numbers) - len(self.told)]

    def _look(self, sums: Sequence[float]) -> None:
        self._since += 1
        self._due = sums[-1] > 0
        if self._left_out:
            self._left_out -= 1
            return
        step = StepSeconds(*(value / self.engine.world for value in sums[:-1]))
        usual = statistics.median(each.whole for each in self._steps) if len(self._steps) >= FIRST else 0.0
        self._slow = self._slow + 1 if usual and step.whole > SLOWER * usual else 0
        self._longer = [*self._longer, step.whole] if self._slow else []
        if not self._slow:
            self._steps.append(step)

    def stepped(self, metrics: Metrics) -> None:
        """A step is done. All ranks come to the same conclusion here."""
        if not self.active or self._follows:
            return
        step, waited = StepSeconds.of(metrics, self.group.name), time.monotonic() - self._measured_at
        due = self._speed is None or (self._since >= LEAST_STEPS and waited > self._cost / SHARE)
        self.told = [step.whole, step.exposed, step.hides, float(due and self.engine.rank == 0)]
        if len(self._steps) >= FIRST and self._trial is not None:
            self._judge(metrics.step + 1, self._trial)
        longer = self._slow >= IN_A_ROW
        if longer or (self._due and len(self._steps) >= FIRST):
            self._choose(metrics.step + 1, longer)

    def follow(self, method: str) -> None:
        """From the next step on this one, and none by what is measured. All ranks must say the same."""
        if self.active:
            self._follows = True
            self._use(method)

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Go on with the method that a saved state was made with, until there is something to choose by."""
        method = facts.get("method")
        if not self.active or method not in {each.name for each in self.methods}:
            return
        if method != self.method:
            self.news.append(Chosen(self.engine.step_number, method, self.method, "the saved state was made with it"))
        self._use(method)

    def state(self) -> dict[str, Any]:
        return {"method": self.method} if self.active else {}

    def tell(self, write: Callable[..., object], say: Callable[[str], object]) -> None:
        """What was chosen since this was last asked."""
        while self.news:
            chosen = self.news.popleft()
            write("comm", **asdict(chosen))
            say(str(chosen))

    def _choose(self, step: int, longer: bool) -> None:
        """``longer``: steps are, than those that are looked back on."""
        began, first = time.monotonic(), self._speed is None
        self._look_back()
        size = links.SMALLEST if self._speed is None else max(links.SMALLEST, self._speed.size // 4)
        self._speed = links.along(self.group, self.engine.device, size)
        self._codec_seconds = self._codec_seconds or {each.name: self._timed(each.name) for each in self.methods}
        hosts_first = links.hosts_first(self.group, self.engine.device, self._speed)
        link, hosts_first, sent, beside = self._agree(self._speed, hosts_first)
        self._measured_at, self._cost = time.monotonic(), time.monotonic() - began
        now = Conditions(
            self._compute, min(self._hides, self._compute), sent, link.rate, link.latency, beside, hosts_first,
            self.work.straight,
        )  # fmt: skip
        plain = {each.name: now.predicted(each, self._codec_seconds[each.name]) for each in self.methods}
        usual = statistics.median(self._longer if longer else [each.whole for each in self._steps])
        self._experience.measured(link.rate, self.method)
        if self.method in self._experience and not longer:
            self._experience.know(self.method, usual, plain[self.method])
        predicted = self._experience.corrected(plain)
        found = choose(predicted, self.methods, "" if first else self.method)
        if first or found != self.method:
            told = ", ".join(f"{name} {1e3 * seconds:.0f} ms" for name, seconds in predicted.items())
            inside = f", {8e-6 * hosts_first:,.0f} inside of hosts first" if self.group.hosts_first else ""
            why = (
                f"{'steps became longer; ' if longer else ''}a rank sends {8e-6 * link.rate:,.0f} Mbit/s{inside}, "
                f"{1e3 * link.latency:.2g} ms a message, and computes {1e3 * now.compute:.0f} ms a step, so that a "
                f"step takes about: {told}. The most exact is taken whose step is hardly longer than the shortest"
            )
            self.news.append(Chosen(step, found, self.method, why, predicted, 8e-6 * link.rate, link.latency))
        if found != self.method:
            trial = MethodTrial({self.method: usual}, plain)
            self._use(found)
            self._trial = trial
        if longer:
            self._steps.clear()
        self._since = self._slow = 0
        self._longer = []

    def _judge(self, step: int, trial: MethodTrial) -> None:
        """Hold the method that is on trial to what its first steps took."""
        own, seconds = self.method, statistics.median(each.whole for each in self._steps)
        self._trial = None
        wanted, following = trial.judged(own, seconds, self._experience, self.methods)
        if wanted == own:
            return
        taken = {**trial.taken, own: seconds}
        told = ", ".join(f"{name} {1e3 * each:.0f} ms" for name, each in taken.items())
        why = f"a step took with {told}"
        predicted = self._experience.corrected(trial.predicted) | taken
        if following is not None:
            why += f", and with {wanted} is predicted to take {1e3 * predicted[wanted]:.0f} ms"
        why += ". The most exact is taken whose step is hardly longer than the shortest"
        self.news.append(Chosen(step, wanted, own, why, predicted))
        self._use(wanted)
        self._trial = following
        self._since, self._measured_at = 0, time.monotonic()

    def _use(self, method: str) -> None:
        self.method, self._trial, self._slow, self._longer = method, None, 0, []
        for codec in self.codecs:
            codec.choose(method)
        self._steps.clear()
        self._left_out = 2  # the last one with the method before, and the first with this one

    def _look_back(self) -> None:
        """On the last steps: what they took without communication."""
        own = self._codec_seconds.get(self.method, 0.0)
        self._compute = statistics.median(max(step.whole - step.exposed - own, 0.0) for step in self._steps)
        self._hides = statistics.median(step.hides for step in self._steps)

    def _timed(self, name: str) -> float:
        """Seconds that a codec takes of a step, on this rank."""
        codec = self.codecs[0].codecs.get(name) if self.codecs else None
        if codec is None:
            return 0.0
        encode, decode = speed.seconds(codec, self.engine.device)
        return (encode * self.work.encoded + decode * self.work.decoded) / speed.SAMPLE

    def _agree(self, link: links.Speed, hosts_first: float) -> tuple[links.Speed, float, float, float]:
        """The slowest of all groups' links and codecs, and the most bytes that a stage sends, on all ranks alike."""
        names, work = list(self._codec_seconds), self.work
        facts = [link.latency, 1 / link.rate, 1 / hosts_first, work.sent, work.beside]
        facts += [self._codec_seconds[name] for name in names]
        own = torch.tensor(facts, dtype=torch.float64, device=self.engine.device)
        self.engine.mesh.world.all_reduce_max(own)
        latency, slowness, inside, sent, beside, *codecs = own.tolist()
        self._codec_seconds = dict(zip(names, codecs, strict=True))
        return links.Speed(latency, 1 / slowness, link.size), 1 / inside, sent, beside
