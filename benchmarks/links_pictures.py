"""Pictures of what `links.py --out FILE.json` found: loss against time and against samples, a row for a link.

    python benchmarks/links_pictures.py FILE.json ... [--losses TRAINED.json] --to docs/links.svg

Losses of training, each the mean of 20 steps. A step takes what one of that method was timed to on that link. What a
method learns does not depend on the link, so the losses of one run (``links.py --steps N``) serve for all links with
``--losses``; those of ``auto`` are then of the method that it chose there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).parent))

from links import A_RANK, DDP, usual_of

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 430, 260, 44, 34, 12, 34
COLOURS = (
    "#7f7f7f", "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#bcbd22", "#17becf",
    "#000000",
)  # fmt: skip
MEAN_OF = 20
Line = list[tuple[float, float]]


def lines(found: dict[str, Any], trained: dict[str, Any]) -> tuple[dict[str, Line], dict[str, Line]]:
    """By method: losses by minutes, and by thousands of samples; of the first seed. ``trained``: whose losses."""
    settings, run, learned = found["settings"], found["runs"][0], trained["runs"][0]
    batch = A_RANK * settings["hosts"] * settings["ranks"]
    by_time, by_samples = dict[str, Line](), dict[str, Line]()
    for name in (name for name in run if name != "dropped at"):
        chosen = run[name]["chosen"]
        source = name if found is trained else DDP if chosen == "exact" and chosen not in learned else chosen
        if source not in learned:
            raise SystemExit(f"no losses of {source}: train it too, with links.py --comm {source} --steps N")
        losses, seconds = learned[source]["losses"], usual_of([run], name, "seconds")
        ends = range(MEAN_OF, len(losses) + 1, MEAN_OF // 2)
        mean = [(end, statistics.mean(losses[end - MEAN_OF : end])) for end in ends]
        by_time[name] = [(end * seconds / 60, loss) for end, loss in mean]
        by_samples[name] = [(end * batch / 1000, loss) for end, loss in mean]
    return by_time, by_samples


def ticks(least: float, most: float) -> list[float]:
    """Some five round numbers between them."""
    rough = (most - least) / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(power * each for each in (1, 2, 5, 10) if power * each >= rough)
    return [step * number for number in range(math.ceil(least / step), math.floor(most / step) + 1)]


def panel(at: tuple[int, int], title: str, unit: str, drawn: dict[str, Line]) -> Iterator[str]:
    """One picture, with a line for each method."""
    xs, ys = zip(*(point for line in drawn.values() for point in line), strict=True)
    right, low, high = max(xs), min(ys), max(ys)
    inner, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + inner * x / right, TOP + tall * (high - y) / (high - low)

    yield f'<g transform="translate({at[0]},{at[1]})"><text x="{LEFT}" y="14" font-weight="bold">{escape(title)}</text>'
    for y in ticks(low, high):
        down = place(0, y)[1]
        yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{down:.1f}" y2="{down:.1f}" stroke="#ddd"/>'
        yield f'<text x="{LEFT - 6}" y="{down + 4:.1f}" text-anchor="end">{y:g}</text>'
    for x in ticks(0, right):
        across = place(x, low)[0]
        yield f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{x:g}</text>'
    yield f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{unit}</text>'
    for number, (name, line) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{across:.1f},{down:.1f}" for across, down in (place(*point) for point in line))
        yield f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        key = f'x="{WIDTH - RIGHT - 4}" y="{TOP + 12 + 14 * number}" text-anchor="end" fill="{colour}"'
        yield f"<text {key}>{escape(name)}</text>"
    yield "</g>"


def picture(every: Sequence[dict[str, Any]], trained: dict[str, Any] | None) -> str:
    """``trained``: whose losses are drawn, if not each file's own."""
    whole = 2 * WIDTH, HEIGHT * len(every)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}" width="{whole[0]}" '
        f'height="{whole[1]}" font-family="sans-serif" font-size="11" fill="#555" role="img" '
        'aria-label="loss by time and by samples, for each method">',
        f'<rect width="{whole[0]}" height="{whole[1]}" fill="#fff"/>',
    ]
    for row, found in enumerate(every):
        settings = found["settings"]
        link = f"{settings['mbits']:g} Mbit/s" if settings["mbits"] else "a link that is not shaped"
        link += f", {1e3 * settings['round_trip']:g} ms round trip" if settings["round_trip"] else ""
        units = "minutes", "thousand samples"
        for column, (drawn, unit) in enumerate(zip(lines(found, trained or found), units, strict=True)):
            parts += panel((column * WIDTH, row * HEIGHT), f"{link}: loss by {unit}", unit, drawn)
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--losses", type=Path, help="a file with the losses of all methods")
    parser.add_argument("--to", type=Path, required=True)
    options = parser.parse_args()
    trained = json.loads(options.losses.read_text()) if options.losses else None
    options.to.write_text(picture([json.loads(path.read_text()) for path in options.files], trained))


if __name__ == "__main__":
    main()
