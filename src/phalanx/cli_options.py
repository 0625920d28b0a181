"""What can be given to ``phalanx train``: each option's type, and what it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TASK = "file.py, package.module, one of these with :Class, or a recipe's name"
PROFILE = "profile steps S to T, as they are shown: from 1, and T too; or modules, or nvtx: docs/profile.md"

Task = Annotated[str | None, typer.Argument(help=TASK)]
Layout = Annotated[str | None, typer.Option(help="how to spread it, e.g. fsdp=4,tp=2,pp=2; by default replicas")]
On = Annotated[
    str | None, typer.Option(help="where: local:N, so many ranks here; slurm:, kubernetes:, ray: or hosts:...")
]
Set = Annotated[list[str], typer.Option("--set", metavar="NAME=VALUE", help="set a field of the task")]
Steps = Annotated[int | None, typer.Option(help="how many steps; short for --set steps=N")]
Epochs = Annotated[float | None, typer.Option(help="or how many passes over the data")]
Run = Annotated[Path | None, typer.Option(help="the run's folder; by default the next free one under runs/")]
Config = Annotated[Path | None, typer.Option(help="repeat the run whose run.toml this is")]
Device = Annotated[str | None, typer.Option(help="cpu or cuda; by default GPUs if there are any")]
Timeout = Annotated[float | None, typer.Option(help="seconds a rank waits for the others; by default 600")]
InitFrom = Annotated[
    str | None, typer.Option(help="begin with the weights of this folder: safetensors, or Hugging Face's")
]
Resume = Annotated[bool, typer.Option("--resume", help="go on with a run: that in --run, or the task's last")]
Trust = Annotated[
    bool, typer.Option("--trust", help="run the code that another user's run.toml names: docs/checkpoints.md")
]
Allow = Annotated[
    str | None, typer.Option(metavar="changes", help="with --resume: go on although other samples are to come")
]
SaveSteps = Annotated[int | None, typer.Option(help="a checkpoint every so many steps")]
SaveMinutes = Annotated[float | None, typer.Option(help="and every so many minutes; by default 10")]
Keep = Annotated[int | None, typer.Option(help="so many checkpoints are kept; by default 2")]
KeepEvery = Annotated[int | None, typer.Option(help="and those of every so many steps")]
MemorySteps = Annotated[int | None, typer.Option(help="a copy in memory every so many steps; by default 5")]
Checkpoints = Annotated[str | None, typer.Option(help="where they go: a folder, or an fsspec URL")]
Restarts = Annotated[
    int | None, typer.Option(help="failures in a row without a step more that end the job; by default 3")
]
MinNodes = Annotated[int | None, typer.Option(help="go on with so few hosts; by default 1")]
MaxNodes = Annotated[int | None, typer.Option(help="run on so many hosts, with this command on each")]
Meet = Annotated[str | None, typer.Option(help="where they meet, host:port, on a host that stays")]
Host = Annotated[str | None, typer.Option(help="this host's name among them; by default its own")]
Interface = Annotated[
    str | None, typer.Option(help="through which they reach this host; by default that of the rendezvous")
]
Log = Annotated[
    list[str],
    typer.Option(metavar="NAME", help="log to csv, tensorboard, wandb, mlflow or opentelemetry too; may be repeated"),
]
LogEvery = Annotated[int | None, typer.Option(help="a line on the screen every so many steps")]
Quiet = Annotated[bool, typer.Option("--quiet", help="print nothing but what must be noted, and the verdict")]
MetricsPort = Annotated[
    str | None, typer.Option(metavar="PORT", help="serve the last numbers to Prometheus at 127.0.0.1, or HOST:PORT")
]
Kill = Annotated[str | None, typer.Option(metavar="RANK@STEP", help="a drill: kill a rank after a step")]
Profile = Annotated[str | None, typer.Option(metavar="S:T[@RANKS]", help=PROFILE)]
Bad = Annotated[str | None, typer.Option(help="a loss or gradient that is bad: skip (by default), rollback, or stop")]
Spike = Annotated[
    float | None, typer.Option(help="a loss of more than so many times the median of the last is bad; 0: none is")
]
LossTolerance = Annotated[
    float | None, typer.Option(help="percent by which a loss may be higher for what comm=auto chooses; by default 0.5")
]
CompareSteps = Annotated[
    int | None, typer.Option(help="ranks that hold the same compare it every so many steps; by default 500")
]
EvaluateOn = Annotated[
    str | None,
    typer.Option(
        metavar="DEVICE", help="evaluate each checkpoint beside training, in a process on cpu, cuda or cuda:1"
    ),
]
Grace = Annotated[float | None, typer.Option(help="seconds to save in when asked to stop; by default 30")]
Exact = Annotated[bool, typer.Option("--exact", help="the same bits at any number of ranks: docs/exact.md")]
Unchecked = Annotated[bool, typer.Option("--unchecked", help="do not check the task: docs/check.md")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="describe the model, check the task, say what would run, and stop")
]
Weights = Annotated[bool, typer.Option("--weights", help="the same, with a line for every weight")]
