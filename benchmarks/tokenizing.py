"""Tokenizing: Phalanx against `datasets.map(batched=True, num_proc=N)` with the same tokenizer and as many processes.

    python benchmarks/tokenizing.py [--quick] [--workers N]

Both begin with the same file of JSON lines, Python's standard library, and end with tokens on disk, in turns. The
peer's time is that of `map` alone, with its file read into Arrow before; ours has the reading in it. Needs `datasets`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_DATASETS_OFFLINE"] = "1"

from phalanx.data.token_folder import tokenize
from phalanx.data.tokenizer import FILE, train_tokenizer
from phalanx.processes import aside
from report import Figure, report

BAR = 1.0


def documents(megabytes: float) -> list[str]:
    library, left, found = Path(sysconfig.get_paths()["stdlib"]), megabytes * 1e6, []
    for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py")):
        if left > 0 and "site-packages" not in path.parts:
            found.append(path.read_text(errors="replace"))
            left -= len(found[-1])
    return found


def processor() -> float:
    """Seconds of a processor that this process and its children have had."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def ours(lines: Path, tokenizer: Path, output: Path, workers: int, part_bytes: int) -> tuple[float, float, int]:
    began, before = time.perf_counter(), processor()
    found = tokenize([lines], output, tokenizer, workers=workers, part_bytes=part_bytes)
    return time.perf_counter() - began, processor() - before, found.tokens


def theirs(lines: Path, tokenizer: Path, cache: Path, workers: int) -> tuple[float, float, int]:
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    model = tokenizers.Tokenizer.from_file(str(tokenizer / FILE))
    data = datasets.load_dataset("json", data_files=str(lines), split="train", cache_dir=str(cache))

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        return {"ids": [found.ids for found in model.encode_batch(batch["text"], add_special_tokens=False)]}

    began, before = time.perf_counter(), processor()
    made = data.map(encode, batched=True, batch_size=100, num_proc=workers, remove_columns=data.column_names)
    seconds, used = time.perf_counter() - began, processor() - before
    return seconds, used, sum(len(ids) for ids in made["ids"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--quick", action="store_true", help="less text, one pair")
    options.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = options.parse_args()
    pairs, megabytes = (1, 2.0) if given.quick else (5, 16.0)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        texts = documents(megabytes)
        lines = folder / "library.jsonl"
        lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        tokenizer = train_tokenizer(texts[:20], 4096, folder / "bpe")
        ratios, used, speeds = [], [], []
        for pair in range(pairs):
            part = max(1 << 18, lines.stat().st_size // (4 * given.workers))
            mine, own, count = aside(
                lambda pair=pair, part=part: ours(lines, tokenizer, folder / f"o{pair}", given.workers, part)
            )
            other, their, same = aside(lambda pair=pair: theirs(lines, tokenizer, folder / f"t{pair}", given.workers))
            assert count == same, f"{count} tokens here and {same} there"
            ratios.append(mine / other)
            used.append(own / their)
            speeds.append(count / mine)
            print(f"pair {pair + 1}: {mine:.2f} s, datasets.map {other:.2f} s, {count:,} tokens", flush=True)
    note = f"{given.workers} processes, {megabytes:g} MB, {statistics.median(speeds) / 1e6:.2f} M tokens a second"
    report([
        Figure("seconds to datasets.map's", statistics.median(ratios), BAR, note),
        Figure("processor seconds to its", statistics.median(used), BAR, "which other work does not change"),
    ])  # fmt: skip


if __name__ == "__main__":
    main()
