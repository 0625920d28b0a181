"""What a run says of its bytes when it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.events import EventLog
from phalanx.layout import Layout
from phalanx.run import Run
from phalanx.train.less_sent import Sent, less_sent
from tests.test_cli import phalanx as command


def test_a_run_says_how_much_less_it_has_sent(tmp_path: Path) -> None:
    """Sites that agree in every second step: a message half as often, and not the steps that were done with int8."""
    (tmp_path / "task.py").write_text(
        "from dataclasses import dataclass\nfrom tests.tasks import Digits\n"
        "@dataclass\nclass Mine(Digits):\n    width: int = 4096\n    steps: int = 4\n"
    )
    given = "task.py", "--on", "local:2", "--quiet", "--unchecked"
    done = command("train", *given, "--layout", "dp=2,comm=int8", "--run", "run", "--steps", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    int8 = "sent of gradients: 33.1 KiB a step instead of 128 KiB (comm=int8: 1/3.87)"
    assert int8 in done.stdout
    more = "--resume", "--layout", "dp=2,comm=local:2", "--run", "run", "--steps", "4"
    done = command("train", *given, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [
        "sent of gradients in steps 1 to 2: 33.1 KiB a step instead of 128 KiB (comm=int8: 1/3.87)",
        "sent to other sites in steps 3 to 4: 64.1 KiB a step instead of 128 KiB (comm=local:2: 1/2)",
    ]
    assert less_sent(Run(tmp_path / "run")) == lines
    assert all(line in done.stdout for line in lines)


@pytest.mark.parametrize(
    ("layout", "sent", "says"),
    [
        ("dp=2,comm=int4", 100, "1/7.68"),
        ("dp=2,comm=bf16", 750, "no less"),
        ("fsdp=2,comm=int4", 1_000, "more, since each weight fills whole blocks"),
        ("dp=16,comm=topk:20", 1_000, "more, since every rank sends to every other"),
        ("dp=2,comm=topk:20", 1_000, "more, since each weight fills whole blocks"),
        ("dp=2,comm=powersgd:4", 1_000, "more, since its two thin matrices are larger than small weights"),
    ],
)
def test_how_much_less_or_why_more(layout: str, sent: float, says: str) -> None:
    line = Sent(Layout.parse(layout), [0], sent, 768).line(several=False)
    assert line.endswith(f"({layout.partition(',')[2]}: {says})")


def test_a_run_says_how_often_auto_was_exact(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", "x")
    with EventLog(run, 0) as log:
        log.write("start", step=0, layout="dp=2,comm=auto", exact_bytes={"dp": 1000})
        for step in range(4):
            if step == 3:
                log.write("comm", step=3, method="int4", before="exact", why="a step is shorter with it")
            log.write("step", step=step, samples="s", sent={"dp": 1100})
    (line,) = less_sent(run)
    assert line.endswith("(comm=auto: more, since each weight fills whole blocks; exact in 3 of 4)")


def test_steps_between_which_there_were_others_are_counted() -> None:
    assert " in 2 of the steps 1 to 4: " in Sent(Layout.parse("dp=2,comm=int8"), [0, 3], 100, 768).line(several=True)
