"""A profile of some steps in words: merged, summed up, and left beside its trace."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from phalanx.files import write_whole
from phalanx.watch.trace import MOST_EVENTS, MergedTrace, notes, parts
from phalanx.watch.trace_times import RankTimes
from phalanx.words import columns, in_bytes, listed, many

SHOWN = 10
"""Operators."""
ORDER = ("data", "forward", "wait", "backward", "reduce", "update")


def conclude(run: Path, name: str) -> str | None:
    """Merge what ranks have left of a profile, and say what it shows; None: they left nothing."""
    folder = run / "profile" / name
    paths = sorted(folder.glob("rank-*.json.gz"))
    if not paths:
        return None
    merged = MergedTrace(folder.with_name(f"{name}.json.gz"), MOST_EVENTS // len(paths))
    found: list[Mapping[str, Any]] = []
    times: list[RankTimes] = []
    try:
        for part in parts(folder):
            merged.add(part)
            found.append(part.facts)
            times.append(RankTimes.of(part))
        merged.close()
    except BaseException:
        merged.discard()
        raise
    if not found:
        return f"nothing was profiled that can be read: {folder}"
    said = [f"note: {note}" for note in notes(found, found[0]["chosen"], merged, folder)]
    size = in_bytes(merged.path.stat().st_size)
    said.append(f"trace: {merged.path}, {size}; https://ui.perfetto.dev or chrome://tracing opens it")
    text = "\n".join([*_words(found, times), *said]) + "\n"
    write_whole(folder.with_name(f"{name}.txt"), text)
    if not merged.thinned and len(found) == len(paths):
        shutil.rmtree(folder)  # all of it is in the merged one
    return text


def _words(found: Sequence[Mapping[str, Any]], times: Sequence[RankTimes]) -> Iterator[str]:
    first, last = min(f["steps"][0] for f in found), max(f["steps"][1] for f in found)
    told = f"step {first}" if first == last else f"steps {first} to {last}"
    yield f"profile of {told} on {many(len(found), 'rank')} of {found[0]['world']} ({found[0]['layout']})"
    steps = max(1, *(len(each.steps) for each in times))
    own_steps = [max(1, len(each.steps)) for each in times]

    def by_name(what: Callable[[RankTimes], Mapping[str, float]]) -> dict[str, float]:
        """Milliseconds a step, the mean over ranks."""
        names = {name for each in times for name in what(each)}
        return {
            name: mean(what(each).get(name, 0.0) / n for each, n in zip(times, own_steps, strict=True)) / 1000
            for name in names
        }

    whole = mean(sum(each.steps) / n for each, n in zip(times, own_steps, strict=True)) / 1000
    yield f"a step took {whole:.2f} ms" + (", with what the profiler costs" if whole else "")
    phases, waits = by_name(lambda each: each.phases), by_name(lambda each: each.waits_in)
    between = mean((each.window - sum(each.steps)) / n for each, n in zip(times, own_steps, strict=True)) / 1000
    rows = [["phase", "ms a step", "share", "waiting for others"]]
    named = [*(p for p in ORDER if p in phases), *sorted(p for p in phases if p not in ORDER)]
    rows += [[p, f"{phases[p]:.2f}", _share(phases[p], whole), f"{waits.get(p, 0.0):.2f}"] for p in named]
    rows += [["(between steps)", f"{between:.2f}", "", ""]] if steps > 1 else []
    yield from ["", *columns(rows, right=(1, 2, 3))]
    yield from _communication(found, by_name(lambda each: each.waits), by_name(lambda each: each.by_axis), own_steps)
    yield from _operators(times, by_name(lambda each: each.operators), whole)
    yield ""
    yield from _slowest(times, own_steps)
    yield from _gpus(times, own_steps)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _communication(
    found: Sequence[Mapping[str, Any]], waits: Mapping[str, float], on_gpu: Mapping[str, float], steps: Sequence[int]
) -> Iterator[str]:
    """By axis and collective: waiting, calls and bytes, a step."""
    sums: dict[str, dict[str, float]] = {}
    for what in ("calls", "sent"):
        for facts, n in zip(found, steps, strict=True):
            for axis, kind, number in facts[what]:
                own = sums.setdefault(f"{axis} {kind}", {"calls": 0.0, "sent": 0.0})
                own[what] += number / n / len(found)
    names = sorted(set(sums) | set(waits), key=lambda name: -waits.get(name, 0.0))
    if not names:
        return
    rows = [["communication", "waited, ms a step", "calls", "sent"]]
    for name in names:
        own = sums.get(name, {"calls": 0.0, "sent": 0.0})
        rows.append([name, f"{waits.get(name, 0.0):.2f}", f"{own['calls']:.3g}", in_bytes(own["sent"])])
    yield from ["", *columns(rows, right=(1, 2, 3))]
    if on_gpu:
        rows = [["communication on the GPU", "ms a step"]]
        rows += [[name, f"{ms:.2f}"] for name, ms in sorted(on_gpu.items(), key=lambda pair: -pair[1])]
        yield from ["", *columns(rows, right=(1,))]


def _operators(times: Sequence[RankTimes], own: Mapping[str, float], whole: float) -> Iterator[str]:
    if not own:
        return
    kind = "kernel" if any(each.gpu_busy is not None for each in times) else "operator, its own time"
    rows = [[kind, "ms a step", "share", "calls"]]
    for name, ms in sorted(own.items(), key=lambda pair: -pair[1])[:SHOWN]:
        calls = mean(each.calls.get(name, 0) / max(1, len(each.steps)) for each in times)
        rows.append([name if len(name) <= 60 else f"{name[:57]}...", f"{ms:.2f}", _share(ms, whole), f"{calls:.3g}"])
    yield from ["", *columns(rows, right=(1, 2, 3))]


def _slowest(times: Sequence[RankTimes], steps: Sequence[int]) -> Iterator[str]:
    """The others wait for whoever works longest."""
    if len(times) < 2:
        return
    works = {each.label: each.works / n / 1000 for each, n in zip(times, steps, strict=True)}
    slowest, quickest = max(works, key=lambda r: works[r]), min(works, key=lambda r: works[r])
    yield (
        f"slowest: {slowest} works {works[slowest]:.2f} ms of a step and waits for others the rest of it; "
        f"the quickest, {quickest}, {works[quickest]:.2f} ms"
    )


def _gpus(times: Sequence[RankTimes], steps: Sequence[int]) -> Iterator[str]:
    busy = {each.label: each.gpu_busy for each in times if each.gpu_busy is not None and each.window}
    if not busy:
        return
    silent = [label for label, us in busy.items() if not us]
    if silent:
        yield (
            f"no GPU activity was recorded of {listed(silent, 4)}: CUPTI could not be used, which another profiler "
            "holds, or which needs more rights"
        )
        return
    idle = {each.label: 1 - (each.gpu_busy or 0.0) / each.window for each in times if each.label in busy}
    most = max(idle, key=lambda label: idle[label])
    exposed = mean(each.gpu_exposed / n for each, n in zip(times, steps, strict=True)) / 1000
    middle = mean(idle.values())
    yield f"GPUs stood idle {100 * middle:.0f} % of the time, most that of {most}: {100 * idle[most]:.0f} %"
    yield f"communication that no computing hides: {exposed:.2f} ms a step"
