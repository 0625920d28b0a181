"""What is other than when a state was saved: settings, the optimizer's numbers, code, data. Said in a line each.

What changes which samples are to come is refused: some would be lost and others trained on twice. Whoever allows it
has it in the certificate.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phalanx import user_code
from phalanx.comm import AUTO, Comm
from phalanx.data.fingerprint import Fingerprint
from phalanx.data.seeding import sample_at
from phalanx.errors import WrongUse
from phalanx.events import plain, say
from phalanx.layout import Layout
from phalanx.local_updates import retired
from phalanx.settings import convert, plain_settings, task_fields
from phalanx.task import rates
from phalanx.train.numbers import plain_values
from phalanx.words import listed

if TYPE_CHECKING:
    from phalanx.train.engine import Engine

ORDER = ("seed", "global_batch")
"""Settings that the order of samples follows from,"""
DRAWN = ("last_batch", "balance")
"""and those that change it where there is something to leave out or to draw."""
SHOWN = 4
"""So many names are told; of the others, how many they are."""


@dataclass(frozen=True)
class Change:
    """Something that is not as it was."""

    words: str
    order: bool = False
    """Whether other samples are to come than were planned when the state was saved."""


def described(engine: Engine) -> dict[str, Any]:
    """What a state is a state of, beside its tensors: the same on every rank, as rank 0 has it."""
    own: list[str] = []
    if engine.environment.rank == 0:
        files = user_code.snapshot(user_code.home(type(engine.task)))
        found = {
            "settings": plain_settings(engine.task),
            "optimizer": {"class": type(engine.optimizer).__name__, **plain_values(engine.optimizer.defaults)},
            "code": user_code.joined(files),
            "files": files,
            "order": engine.order.facts(),
            "fingerprint": asdict(engine.loader.looked_at(lambda: _fingerprint(engine))),
        }
        own = [json.dumps(plain(found))]
    (text,) = engine.mesh.world.broadcast_words(own, 0)
    return dict(json.loads(text))


def _fingerprint(engine: Engine) -> Fingerprint:
    return Fingerprint.of(engine.order.size, _reader(engine), engine.loader.reader.data)


def _reader(engine: Engine) -> Callable[[int], Any]:
    return lambda index: sample_at(engine.loader.reader.data, index, engine.task.seed)


def allowed_changes(engine: Engine, facts: Mapping[str, Any], allow: bool) -> list[Change]:
    """What is other than when a state was saved, said once; refused where other samples are to come, unless allowed."""
    found = changes(engine, facts)
    others = [change.words for change in found if change.order]
    if others and not allow:
        raise WrongUse(
            f"since the state was saved, {'; '.join(others)}: the samples to come would be others, some of them "
            "again and some never. Make it what it was, start a new run with --init-from, or go on all the same "
            "with --allow changes, which the certificate will say."
        )
    if engine.environment.rank == 0:
        for change in found:
            say(f"changed  {change.words}")
    return found


def changes(engine: Engine, facts: Mapping[str, Any]) -> list[Change]:
    """All that is other than what the ``facts`` of a saved state say, as far as its version noted it."""
    found = [*_settings(engine, facts), *_data(engine, facts)] if engine.environment.rank == 0 else []
    words = engine.mesh.world.broadcast_words([json.dumps(asdict(change)) for change in found], 0)
    return [Change(**json.loads(word)) for word in words]


def _settings(engine: Engine, facts: Mapping[str, Any]) -> list[Change]:
    now = engine.described
    then = {name: facts[name] for name in ORDER} | dict(facts.get("settings", {}))
    here = {name: getattr(engine.task, name) for name in ORDER} | (now["settings"] if "settings" in facts else {})
    found, pairs = [], []
    for name in dict.fromkeys([*then, *here]):
        if name not in here or name not in then:
            words = f"{name} is no setting any more" if name in then else f"{name} is a new setting, {here[name]}"
            found.append(Change(words))
        elif then[name] != here[name]:
            pairs.append((then[name], here[name]))
            other = name in ORDER or (name in DRAWN and _other_order(engine, facts))
            found.append(Change(f"{name} was {_shown(then[name])} and is {_shown(here[name])}", other))
    if pairs and "settings" in facts:
        found += _schedule(engine, {n: then[n] for n in here if n in then and then[n] != here[n]}, facts["step"])
    for name, value in now["optimizer"].items() if "optimizer" in facts else ():
        before = facts["optimizer"].get(name)
        if before != value and (before, value) not in pairs:  # a rate that follows from a setting was told
            what = "the optimizer" if name == "class" else f"the optimizer's {name}"
            found.append(Change(f"{what} was {before} and is {value}"))
    if "layout" in facts:
        before_now = Layout.parse(facts["layout"]), engine.layout
        changed = (
            *_owed(*before_now, facts),
            _begun_anew(*before_now, facts),
            *_sites(*before_now, facts),
        )
        told = [change for change in changed if change is not None]
        found += [*(told or _comm(*before_now)), *map(Change, retired(before_now[0].comm))]
    found += _callbacks(list(facts["callbacks"]), list(engine.callbacks.named)) if "callbacks" in facts else []
    others = user_code.changed(facts.get("files", {}), user_code.home(type(engine.task)))
    if others:
        found.append(Change(f"code: {listed(others, SHOWN)} {'is' if len(others) == 1 else 'are'} not what it was"))
    for name, version in facts.get("versions", {}).items():
        if version != (known := engine.versions.get(name)):
            found.append(Change(f"{name} was {version} and is {known}"))
    return found


def _owed(then: Layout, now: Layout, facts: Mapping[str, Any]) -> list[Change]:
    """Where gradients are sent otherwise than they were, and something of them was still owed."""
    before, after = Comm.parse(then.comm), Comm.parse(now.comm)
    if before is None or not before.owes or not then.coded_axis:
        return []
    another = f"comm was {then.comm} and is {now.comm}: " if then.comm != now.comm else ""
    of = "momentum" if before.name == "onebit" else "gradients"
    if after is None or not after.owes or not now.coded_axis:
        return [Change(f"{another or _no_effect(now)}what was still owed of {of} is left out")]
    if (before.name == "onebit") != (after.name == "onebit"):
        return [Change(f"{another}what was still owed of {of} is left out")]
    found = []
    if facts.get("owed_missing"):
        found.append(Change(f"what the hosts that are lost owed of {of} is left out"))
    if then.coded_axis == "dp" and (then.tp, then.ep) != (now.tp, now.ep):
        found.append(Change("weights are cut otherwise: what was still owed of sums over replicas is left out"))
    if another and after.name == AUTO:
        found.append(Change(f"{another}what was still owed of gradients is added to the next step's"))
    elif another and before.name != after.name == "powersgd":
        goes_on = "what was still owed of matrices goes on to be, and of other gradients is left out"
        found.append(Change(f"{another}{goes_on}"))
    elif another:
        found.append(Change(f"{another}what was still owed of gradients goes on to be"))
    return found


def _no_effect(now: Layout) -> str:
    return f"comm={now.comm} has no effect at dp=1,fsdp=1: "


def _comm(then: Layout, now: Layout) -> list[Change]:
    """Where gradients travel otherwise, and nothing else follows from that."""
    travels = then.coded_axis or now.coded_axis or then.local or now.local
    alike = then.comm == now.comm or (then.local is not None and then.local == now.local)
    return [Change(f"comm was {then.comm} and is {now.comm}")] if travels and not alike else []


def _sites(then: Layout, now: Layout, facts: Mapping[str, Any]) -> Iterator[Change]:
    """Where sites that trained by themselves are others, or none, or agree otherwise."""
    before, after = then.local, now.local
    if before is None:
        return
    another = f"comm was {then.comm} and is {now.comm}: " if then.comm != now.comm else ""
    carried = "what the outer optimizer carried on is left out"
    had = tuple(facts.get("outer") or before.outer)
    has = after.outer if after is not None else (1.0, 0.0)
    drops = had[1] and not has[1]
    if before == after and had != has:
        yield Change(
            f"rate and momentum of the outer optimizer were {had[0]:g} and {had[1]:g} and are {has[0]:g} and {has[1]:g}"
        )
    if after is not None and then.dp == now.dp:
        if before.apart and not after.apart:
            yield Change(f"{another}the mean of what sites have of weights is what all go on with")
        if drops:
            yield Change(f"{another}{carried}")
    else:
        if after is not None:
            another += f"there were {then.dp} sites and are {now.dp}: "
        what = f"what the optimizers of {then.dp} sites kept is averaged" + ", and so are their weights" * before.apart
        if facts.get("sites_missing"):
            what = "some are lost, and each rank takes the mean of what it finds of what the optimizers of others kept"
        yield Change(f"{another}{what}{f'; {carried}' if drops else ''}")


def _begun_anew(then: Layout, now: Layout, facts: Mapping[str, Any]) -> Change | None:
    """Where a method kept more than what is owed, and goes on without."""
    before, after = Comm.parse(then.comm), Comm.parse(now.comm)
    if before is None or not then.coded_axis:
        return None
    stays = after is not None and after.name == before.name and now.coded_axis == then.coded_axis
    if before.name == "onebit" and not stays and any("frozen" in each for each in facts.get("options", {}).values()):
        another = f"comm was {then.comm} and is {now.comm}: " if then.comm != now.comm else _no_effect(now)
        return Change(f"{another}the variance of gradients is not frozen any more")
    if before.name == "powersgd" and stays:
        cuts = [(layout.fsdp, layout.cp, layout.tp, layout.ep) for layout in (then, now)]
        if before.number != (after and after.number) or cuts[0] != cuts[1]:
            return Change("weights are cut otherwise, or comm has another R: what sums are projected on begins anew")
    return None


def _callbacks(then: Sequence[str], now: Sequence[str]) -> list[Change]:
    """``then`` and ``now``: their names."""
    lost = [f"the callback {name} is left out, with what it may have kept" for name in then if name not in now]
    return [Change(words) for words in (*lost, *(f"the callback {name} is new" for name in now if name not in then))]


def _schedule(engine: Engine, then: Mapping[str, Any], step: int) -> list[Change]:
    """Whether other settings mean another rate for the steps to come."""
    before = copy.copy(engine.task)
    hints = task_fields(type(before))
    try:
        for name, value in then.items():
            object.__setattr__(before, name, convert(value, hints[name], name))
        old = rates(before)
        last = max(step, before.steps - 1)
        for place in dict.fromkeys([step, (step + last) // 2, last]):
            was, now = old(place), engine.schedule(place)
            if was != now:
                return [
                    Change(f"the schedule gives step {place + 1} {now:.4g} of the learning rate, and gave it {was:.4g}")
                ]
    except Exception:  # a schedule that cannot be asked so: the settings that changed were told
        return []
    return []


def _other_order(engine: Engine, facts: Mapping[str, Any]) -> bool:
    """Whether samples come in another order, beside what follows from the seed and the batch."""
    return bool(facts.get("order", {}) != engine.described["order"])


def _of_order(facts: Mapping[str, Any]) -> str:
    """What is other, where the order is, by what then and now say of it."""
    if "curriculum" in facts:
        return "samples were mixed by other weights, or from sources of other sizes"
    if "weights" in facts or "classes" in facts:
        return "samples were drawn by other weights, or are of other classes"
    return "samples came in another order"


def _shown(value: Any) -> Any:
    return "none" if value == "" else value


def _data(engine: Engine, facts: Mapping[str, Any]) -> list[Change]:
    size, known = engine.order.size, Fingerprint.parse(facts.get("fingerprint"))
    if facts["data"] != size:
        return [Change(f"there were {facts['data']:,} samples to train on and are {size:,}", order=True)]
    if _other_order(engine, facts):
        settings = facts.get("settings", {})
        told = any(name in settings and settings[name] != getattr(engine.task, name) for name in DRAWN)
        return [] if told else [Change(_of_order({**facts.get("order", {}), **engine.described["order"]}), order=True)]
    if known is None or facts["seed"] != engine.task.seed or not known.samples:
        return []  # what is drawn while a sample is made follows from the seed
    here = Fingerprint.parse(engine.described["fingerprint"])
    assert here is not None
    others, looked = known.others(here)
    repeatable = known.repeatable and here.repeatable
    repeats = engine.loader.looked_at(lambda: all(here.repeats(index, _reader(engine)) for index in others))
    if not (repeatable and repeats):
        return [Change("the data is not repeatable: a sample that is read twice differs, so it was not compared")]
    if not others:
        return []
    words = f"the data is not what it was: {len(others)} of {looked} samples that were looked at are others"
    return [Change(f"{words} ({listed([*map(str, others)], SHOWN)})", order=True)]
