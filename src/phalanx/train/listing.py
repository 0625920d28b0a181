"""Each weight under a layout, a line each: what a rank has of it, what cuts it, over which axes gradients add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from phalanx.parallel.communication.mesh import Grid
from phalanx.parallel.weights.placement import Placed, Placement
from phalanx.words import columns

HEAD = ("weight", "shape", "a rank has", "updates", "cut by", "gradient summed over")


def listed(placement: Placement, every: bool = False) -> list[str]:
    """The table; weights of blocks that are alike in one line, or ``every`` weight in one of its own."""
    found = Counter(_row(placement, one, every) for one in placement.weights.values())
    rows = [(name if times == 1 else f"{name} (x {times})", *rest) for (name, *rest), times in found.items()]
    return columns([HEAD, *rows])


def _row(placement: Placement, one: Placed, every: bool) -> tuple[str, ...]:
    grid = Grid(placement.layout, 0)
    part = one.part(grid)
    own = one.rows(grid).size if part else ()
    block = "" if every else next((b for b in placement.anatomy.blocks if one.name.startswith(f"{b}.")), "")
    name = f"{block.rpartition('.')[0]}.*{one.name.removeprefix(block)}" if block else one.name
    kept = "" if one.policy.trainable else f", frozen {str(one.policy.dtype).removeprefix('torch.')}"
    return (
        name,
        _by(one.shape),
        _by(part if one.policy.always_whole else own),
        _by(own) if one.policy.trainable else "nothing",
        (", ".join(_cuts(placement, one, bool(block))) or "nothing") + kept,
        ", ".join(placement.summed_over(one.name)) or "none",
    )


def _cuts(placement: Placement, one: Placed, in_blocks: bool) -> Iterator[str]:
    grid, layout = Grid(placement.layout, 0), placement.layout
    if one.cut is not None:
        yield f"{one.cut.axis} (dim {one.cut.dim})"
    if grid.size(*one.policy.axes) > 1:
        axes = "x".join(axis for axis in ("fsdp", "cp") if getattr(layout, axis) > 1)
        yield f"{axes} (rows)"
    if layout.pp > 1:
        yield "pp (a stage each)" if in_blocks else f"pp (stage {', '.join(map(str, one.stages))})"


def _by(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "1"
