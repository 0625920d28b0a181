"""``phalanx tokenize``: documents to a folder of token files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, get_args

import typer

from phalanx.errors import WrongUse
from phalanx.progress import progress
from phalanx.verdict import Verdict
from phalanx.words import in_bytes, in_time

SHOWN = 5


def tokenize(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="INPUT... OUTPUT", help="jsonl, txt, parquet or csv files or folders; what to write"),
    ],
    tokenizer: Annotated[str, typer.Option(help="a tokenizer.json, a folder that has one, or bytes")],
    field: Annotated[str, typer.Option(help="which field or column is the text")] = "text",
    end: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="closes each document; by default the tokenizer's eos_token")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="processes; by default one a core")] = None,
    bad_rows: Annotated[str, typer.Option(help="a row that is none: stop there, or skip it")] = "stop",
    json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Encode documents once, into a folder of token files that training reads; run again, it goes on where it was."""
    from phalanx.data.token_folder import tokenize as encode
    from phalanx.task import BadRows

    if len(paths) < 2:
        raise WrongUse("name the inputs and then the folder to write: phalanx tokenize a.jsonl b.jsonl tokens")
    if bad_rows not in get_args(BadRows):
        raise WrongUse(f"--bad-rows {bad_rows} is not known. Choose one of: {', '.join(get_args(BadRows))}.")
    *inputs, output = paths
    began = time.monotonic()
    with progress() as show:
        found = encode(
            inputs, output, tokenizer, field=field, end=end, workers=workers, bad_rows=bad_rows, progress=show  # type: ignore[arg-type]
        )  # fmt: skip
    size = sum(source["bytes"] for source in found.sources)
    lines = [
        f"tokenizer  {found.made['tokenizer']['name']}, {found.vocabulary:,} ids as {found.dtype}, documents end with "
        f"{found.made['tokenizer']['end'] or 'nothing'}",
        f"   shards  {len(found.shards)}, of {in_bytes(size)} of {len(found.sources)} files",
        f"     time  {in_time(time.monotonic() - began)}",
    ]
    if found.empty:
        lines.append(f"    empty  {found.empty:,} documents without text are left out")
    if found.bad:
        lines.append(f" left out  {found.bad:,} bad rows")
        lines += [f"           {row}" for row in found.bad_rows[:SHOWN]]
    verdict = Verdict(True, f"{output} has {found.tokens:,} tokens of {found.documents:,} documents", lines)
    print(verdict.to_json() if json else verdict)
