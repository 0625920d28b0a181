"""Settings of a layout that have no effect where it runs, or cost more than they need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from phalanx.comm import AUTO, EXACT
from phalanx.layout import DEGREES, Layout


def layout_notes(
    layout: Layout, device: str, micro_batches: int = 1, stream: int = 4, hosts: Sequence[int] = (),
    shard_hosts: Sequence[int] = (),
) -> list[str]:  # fmt: skip
    """Settings that have no effect here, or cost more than they need, each said in a line.

    ``stream``: bytes of a number of it. ``hosts``: of the ranks along ``dp``, where that is known; ``shard_hosts``: of
    those that share the state.
    """
    notes = []
    if layout.pp > 1:
        idle = layout.idle(micro_batches)
        advice = "; a smaller micro_batch leaves less" if idle > 0.2 else ""
        notes.append(
            f"pp={layout.pp} leaves ranks idle at least {idle:.0%} of the time, the micro-batches being "
            f"{micro_batches}{advice}"
        )
    if layout.fsdp * layout.cp == 1 and layout.zero != Layout.zero:
        notes.append(f"zero={layout.zero} has no effect at fsdp=1,cp=1: there is nobody to share the state with")
    if layout.pp == 1 and layout.schedule != Layout.schedule:
        notes.append(f"schedule={layout.schedule} has no effect at pp=1")
    if layout.activations != EXACT and layout.pp * layout.ep * layout.tp * layout.cp == 1:
        notes.append(f"activations={layout.activations} has no effect at tp=1,cp=1,pp=1,ep=1: nobody sends any")
    elif layout.activations == "bf16" and stream <= 2:
        notes.append("activations=bf16 has no effect: the stream has 16 bits by itself")
    if layout.cp == 1 and layout.cp_kind != Layout.cp_kind:
        notes.append(f"cp_kind={layout.cp_kind} has no effect at cp=1")
    if layout.compile != "none" and layout.recompute == "selective":
        notes.append(
            "recompute=selective has no effect with compile=blocks: its compiler keeps costly results and computes "
            "cheap ones again by itself"
        )
    notes += [*_of_comm(layout), *_of_hosts(layout, device, hosts), *_of_shards(layout, device, shard_hosts)]
    if layout.exact and device == "cpu":
        notes.append(
            f"exact={layout.exact} computes on 1 thread, or OMP_NUM_THREADS, at any number of ranks, and takes plain "
            "kernels where the optimizer asks for fused ones"
        )
    if layout.graphs != "none" and device == "cpu":
        notes.append(f"graphs={layout.graphs} has no effect on a CPU: there is no CUDA to record")
    if layout.recompute == "host" and device == "cpu":
        notes.append("recompute=host is recompute=full on a CPU: its memory is the host's already")
    if layout.offload != "none" and device == "cpu":
        notes.append(f"offload={layout.offload} saves nothing on a CPU: its memory is the host's already")
    return notes


def _of_comm(layout: Layout) -> list[str]:
    if layout.comm == EXACT:
        return []
    if layout.local is not None:
        return [layout.local.note(layout.comm, layout.dp)]
    if not layout.coded_axis:
        travel = f"those over cp={layout.cp} travel as they are" if layout.cp > 1 else "no gradients travel"
        return [f"comm={layout.comm} has no effect at dp=1,fsdp=1: {travel}"]
    others = [
        f"{name}={degree}" for name in DEGREES if name != layout.coded_axis and (degree := getattr(layout, name)) > 1
    ]
    kept = f"; what goes along {', '.join(others)} is as without it" if others else ""
    if layout.comm == AUTO:
        also = "; weights are gathered as they are" if layout.coded_axis == "fsdp" else ""
        return [f"comm=auto chooses how gradients travel over {layout.coded_axis}, by what is measured{also}{kept}"]
    weights = " and gathers weights in few bits" if layout.coded_axis == "fsdp" else ""
    along = f"{layout.coded_axis}={getattr(layout, layout.coded_axis)}"
    return [f"comm={layout.comm} sums gradients over {along}{weights}{kept}"]


def _of_hosts(layout: Layout, device: str, hosts: Sequence[int]) -> Iterator[str]:
    """Of replicas that share hosts with each other."""
    each = list(Counter(hosts).values())
    if len(each) < 2 or max(each) == 1 or layout.local is not None:
        return
    even = len(set(each)) == 1
    if layout.coded_axis == "dp" and even and layout.comm != AUTO and not layout.comm.startswith("powersgd"):
        better = replace(layout, dp=len(each), fsdp=layout.fsdp * each[0], zero=min(layout.zero, 2))
        fewer = f"1/{each[0]}" if layout.comm.startswith("topk") else f"2/{each[0] + 1}"  # half of others' is gathered
        yield (
            f"comm={layout.comm} sends codes of each of the {each[0]} ranks on each of {len(each)} hosts; with "
            f"{better} sums inside of hosts stay exact, and {fewer} as much travels between them"
        )
    elif layout.comm == EXACT and not even and device == "cpu":
        yield (
            f"dp={layout.dp} has {', '.join(map(str, each))} ranks on {len(each)} hosts, so they sum in one ring over "
            "all of them; with as many on each host sums go inside of hosts first, and less travels between them"
        )


def _of_shards(layout: Layout, device: str, hosts: Sequence[int]) -> Iterator[str]:
    """Of ranks that share the state, and hosts with each other."""
    each = list(Counter(hosts).values())
    if device == "cpu" and len(set(each)) > 1:
        axes = f"fsdp={layout.fsdp}" + (f",cp={layout.cp}" if layout.cp > 1 else "")
        yield (
            f"{axes} has {', '.join(map(str, each))} ranks on {len(each)} hosts, so each of them gets every row from "
            "its rank; with as many on each host a row passes between two hosts once"
        )
