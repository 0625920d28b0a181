"""Why ranks stand still: one that never came, ranks that came to different collectives, a ring, or the network."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from phalanx.flight import OUTSIDE, Flight, Launch
from phalanx.watch.diagnosis import Diagnosis
from phalanx.watch.evidence import Evidence
from phalanx.watch.waits import Waits, sides
from phalanx.words import ranks_named

STILL_SECONDS, TIMES_MEDIAN, LAST_STEPS = 5.0, 10, 32
"""In a run that goes on, a rank may stand still for so long, or for so many times the median of so many steps."""
LEAST_STEPS = 4
"""Steps from which that is known."""
LONG = ("start-up", "checkpoint", "evaluation", "ending", "comparing replicas", "outer step")
LONG_SECONDS = 60.0
"""And for so long in what is no step, and in the first ones."""
SHOWN = 8
"""So many ranks, and lines of a stack, are named."""


def desynchronised(evidence: Evidence) -> Diagnosis | None:
    """Ranks of one group have come to different collectives, or brought different amounts to the same one."""
    waits = Waits(evidence.flights)
    launches = waits.apart()
    if not launches:
        return None
    (most_count, most), (other_count, other), *rest = sides(launches, waits.alike(launches))
    others = [other, *(side for _, side in rest)]
    sure = most_count > other_count
    one = other[0]
    both = [
        f"{side[0].kind} {side[0].content} of {ranks_named([each.rank for each in side])} at {side[0].place}"
        for side in (other, most)
    ]
    words = [
        f"{evidence.who(each.rank)}: {each.kind} {each.content}, in step {each.step + 1}, in {each.phase}, called at "
        f"{each.place}"
        for side in (other, *others[1:], most)
        for each in side[:SHOWN]
    ]
    if not sure:
        words.append("they are equally many, so that which of them is right is not known")
    elif len(most) <= len(other):
        words.append(
            f"ranks of other groups along {one.axis} brought what {ranks_named([each.rank for each in most])} did"
        )
    words += [f"rank {failure['rank']} then {failure['reason']}" for failure in evidence.failures[:2]]
    return Diagnosis(
        False, f"desynchronised: collective {one.sequence} on {one.axis} is {' and '.join(both)}", words,
        next="Every rank must launch the same collectives in the same order: look for what depends on the rank at "
        f"{one.place}.",
        kind="desynchronised", rank=one.rank if sure else None, host=one.host if sure else "", axis=one.axis,
        step=one.step + 1, place=one.place,
    )  # fmt: skip


def stuck(evidence: Evidence) -> Diagnosis | None:
    """Ranks wait, and have for too long: as the supervisor said, or in a run that goes on as their records say."""
    said = [each for each in evidence.failures[:1] if each["stuck"] or each["timed_out"]]
    if evidence.done or evidence.stopped or not (said or evidence.live):
        return None
    waits = Waits(evidence.flights)
    if not said and not (waits.inside and still_for_long(evidence)):
        return None
    reason = f"its supervisor said: rank {said[0]['rank']} {said[0]['reason']}" if said else ""
    culprits = waits.culprits()
    if not culprits and said and said[0]["stuck"] and said[0]["rank"] not in waits.inside:
        culprits = {said[0]["rank"]: []}
    if not culprits and (odd := waits.odd_one(waits.ring())) is not None:
        culprits = {odd: [rank for rank in waits.inside if rank != odd]}
    if culprits:
        rank, waiting = next(iter(culprits.items()))
        return _missing(evidence, waits, rank, waiting, reason)
    return _ring(evidence, waits, reason) or _network(evidence, waits, reason)


def still_for_long(evidence: Evidence) -> list[int]:
    """Ranks that have noted nothing for longer than a step takes them."""
    allowed = dict.fromkeys(LONG, LONG_SECONDS)
    usual = _allowed(evidence)
    return [rank for rank, each in evidence.flights.items() if still(each) > allowed.get(each.phase, usual)]


def still(flight: Flight) -> float:
    """Seconds since a rank last noted anything, when its record was saved."""
    noted = [flight.records[name].max(initial=0) for name in ("launched", "arrived", "waiting", "left")]
    return (flight.saved - max(*map(int, noted), flight.since)) / 1e9


def _allowed(evidence: Evidence) -> float:
    """Seconds that a rank may stand still in a step."""
    times = [event["time"] for event in evidence.events("step")][-LAST_STEPS:]
    if len(times) < LEAST_STEPS:
        return LONG_SECONDS
    return max(STILL_SECONDS, TIMES_MEDIAN * median(after - before for before, after in pairwise(times)))


def _missing(evidence: Evidence, waits: Waits, rank: int, waiting: list[int], reason: str) -> Diagnosis:
    """One rank holds up all others."""
    direct = [waits.inside[other] for other in waiting if rank in waits.awaited[other]]
    place, words = _where(evidence, rank)
    if rank in waits.inside and waits.inside[rank].axis != OUTSIDE and direct and direct[0].user:
        own, place = waits.inside[rank], direct[0].user  # it went past what most ranks of the user's code came to
        words = f"has been in {own.name} for {still(evidence.flights[rank]):.0f} s; they were called at {place}"
    flight = evidence.flights.get(rank)
    if direct:
        never = f"never came to {direct[0].name}, where {ranks_named([each.rank for each in direct])} "
        never += "waits for it; it " if len(direct) == 1 else "wait for it; it "
    else:
        never = ""
    told = [_waits_in(evidence, waits.inside[other]) for other in waiting[:SHOWN]]
    frames = evidence.frames(rank)[:SHOWN]
    if frames:
        told.append(
            "its stack, the innermost line first: " + " < ".join(f"{each.place} {each.name}" for each in frames)
        )
    known = evidence.stacks.get(rank)
    if known is not None:
        told.append(f"its process: {known.state}")
    return Diagnosis(
        False, f"stuck: {evidence.who(rank)} {never}{words}", [*told, *([reason] if reason else [])],
        next=_advice(evidence, waits, rank, place), kind="stuck", rank=rank, host=evidence.host(rank),
        axis=direct[0].axis if direct else "", step=flight.step + 1 if flight else None, place=place,
    )  # fmt: skip


def _where(evidence: Evidence, rank: int) -> tuple[str, str]:
    """File and line where a rank is, if that is known, and what it does there in words."""
    flight, frame, known = evidence.flights.get(rank), evidence.line(rank), evidence.stacks.get(rank)
    place = frame.place if frame else ""
    since = f" for {still(flight):.0f} s" if flight else ""
    if known is not None and known.stopped:
        return place, f"is {known.state}"
    if called := evidence.called(rank):
        return place, f"has been in {called}{since}, called at {place}"
    phase = f"in {flight.phase}" if flight else "still"
    return place, f"has been {phase}{since}" + (f", at {place} in {frame.name}" if frame else "")


def _advice(evidence: Evidence, waits: Waits, rank: int, place: str) -> str:
    known = evidence.stacks.get(rank)
    if known is not None and known.stopped:
        return f"Somebody stopped that process on {evidence.host(rank)}, or a debugger did: kill -CONT lets it go on."
    if evidence.called(rank) or waits.inside.get(rank):
        return f"All ranks must call a collective: look for what depends on the rank around {place}."
    if place:
        return f"Look at {place}. phalanx why {evidence.run.in_shell} --stacks shows all stacks."
    return f"phalanx why {evidence.run.in_shell} --stacks shows what it does, while it runs."


def _waits_in(evidence: Evidence, launch: Launch) -> str:
    flight = evidence.flights[launch.rank]
    seconds = (flight.saved - (launch.waiting or launch.entered)) / 1e9
    return (
        f"{evidence.who(launch.rank)} waits for {seconds:.0f} s in {launch.name}, {launch.content}, in step "
        f"{launch.step + 1}, in {launch.phase}, called at {launch.place}"
    )


def _ring(evidence: Evidence, waits: Waits, reason: str) -> Diagnosis | None:
    ring = waits.ring()
    if not ring:
        return None
    launches = [waits.inside[rank] for rank in ring]
    each = [
        f"rank {one.rank} waits in {one.name} for rank {other}"
        for one, other in zip(launches, ring[1:] + ring[:1], strict=True)
    ]
    return Diagnosis(
        False, f"deadlock: {', and '.join(each)}",
        [*(_waits_in(evidence, one) for one in launches[:SHOWN]), *([reason] if reason else [])],
        next="Ranks must come to collectives of different axes in one order: look at "
        f"{' and '.join(dict.fromkeys(one.place for one in launches))}.",
        kind="deadlock", axis=launches[0].axis, step=launches[0].step + 1, place=launches[0].place,
    )  # fmt: skip


def _network(evidence: Evidence, waits: Waits, reason: str) -> Diagnosis:
    """All have come to where they are, and none goes on."""
    launches = list(waits.inside.values())
    if not launches:
        return Diagnosis(False, f"stuck: {reason or 'no rank moves'}", next="Ask again with --stacks.", kind="stuck")
    one = launches[0]
    missing = waits.unknown(one)
    words = f"{missing} of its ranks have left no record" if missing else "all of its ranks have come there"
    return Diagnosis(
        False, f"stuck: {ranks_named([each.rank for each in launches])} wait in {one.name}, and {words}",
        [*(_waits_in(evidence, each) for each in launches[:SHOWN]), *([reason] if reason else [])],
        next="Look at the network between their hosts: phalanx doctor." if not missing
        else "Look at the hosts of the others: nothing of theirs is in this folder.",
        kind="network", axis=one.axis, step=one.step + 1, place=one.place,
    )  # fmt: skip
