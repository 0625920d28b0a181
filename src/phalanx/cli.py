"""The command line: one verb a function, nothing else."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # gloo warns of every connection that an ending rank closes
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # or torch.cuda.is_available() would spoil forks

import typer

from phalanx import __version__ as version
from phalanx import cli_doctor, cli_evaluate, cli_new, cli_tokenize, cli_tune
from phalanx import cli_options as option
from phalanx.cli_answers import TaskVerb, Verbs
from phalanx.cli_doctor import conclude
from phalanx.errors import CannotHere, WrongUse
from phalanx.launch import verbs
from phalanx.launch.stopping import ENDING
from phalanx.redact import learn_words, redact
from phalanx.watch.page import watching
from phalanx.words import printable

app = typer.Typer(
    cls=Verbs, add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)


def _version(wanted: bool) -> None:
    if wanted:
        print(version)
        raise typer.Exit


@app.callback()
def phalanx(
    _: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    """Train PyTorch models on one device or thousands with the same code."""


@contextmanager
def _stoppable(told: str) -> Iterator[None]:
    """Signals that ask to end are heeded once, so that what is unfinished is cleared away; then this is told."""
    numbers = [n for n in ENDING if signal.getsignal(n) is not signal.SIG_IGN]

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: {told}", file=sys.stderr)
        raise SystemExit(130) from None  # whatever else comes while this process ends
    except SystemExit:
        for number in numbers:  # schedulers repeat theirs: the exit code is said, and stays
            signal.signal(number, signal.SIG_IGN)
        raise
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


@app.command(cls=TaskVerb)
@_stoppable("no rank was running")
def train(
    task: option.Task = None,
    layout: option.Layout = None,
    on: option.On = None,
    set_: option.Set = [],  # noqa: B006
    steps: option.Steps = None,
    epochs: option.Epochs = None,
    run: option.Run = None,
    config: option.Config = None,
    device: option.Device = None,
    timeout: option.Timeout = None,
    init_from: option.InitFrom = None,
    resume: option.Resume = False,
    allow: option.Allow = None,
    trust: option.Trust = False,
    save_steps: option.SaveSteps = None,
    save_minutes: option.SaveMinutes = None,
    keep: option.Keep = None,
    keep_every: option.KeepEvery = None,
    memory_steps: option.MemorySteps = None,
    checkpoints: option.Checkpoints = None,
    restarts: option.Restarts = None,
    min_nodes: option.MinNodes = None,
    max_nodes: option.MaxNodes = None,
    meet: option.Meet = None,
    host: option.Host = None,
    interface: option.Interface = None,
    log: option.Log = [],  # noqa: B006
    log_every: option.LogEvery = None,
    quiet: option.Quiet = False,
    metrics_port: option.MetricsPort = None,
    kill: option.Kill = None,
    profile: option.Profile = None,
    bad: option.Bad = None,
    spike: option.Spike = None,
    loss_tolerance: option.LossTolerance = None,
    compare_steps: option.CompareSteps = None,
    grace: option.Grace = None,
    evaluate_on: option.EvaluateOn = None,
    exact: option.Exact = False,
    unchecked: option.Unchecked = False,
    dry_run: option.DryRun = False,
    weights: option.Weights = False,
) -> None:
    """Train a task."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is something to save
    from phalanx.launch.local_leader import led
    from phalanx.launch.started import Started

    given: dict[str, Any] = dict(  # noqa: C408
        task=task, layout=layout, on=on, assignments=set_, steps=steps, epochs=epochs, config=config, device=device,
        save_steps=save_steps, save_minutes=save_minutes, keep=keep, keep_every=keep_every, memory_steps=memory_steps,
        checkpoints=checkpoints, restarts=restarts, grace=grace, init_from=init_from, timeout=timeout,
        evaluate_on=evaluate_on, bad=bad, spike=spike, loss_tolerance=loss_tolerance, compare_steps=compare_steps,
        min_nodes=min_nodes, max_nodes=max_nodes, meet=meet, host=host, interface=interface, kill=kill, allow=allow,
        resume=resume, exact=exact, unchecked=unchecked or None, run=run, log=log or None, metrics_port=metrics_port,
        log_every=log_every, quiet=quiet or None, profile=profile, trust=trust or None,
    )  # fmt: skip
    with led(Started.unless_placed(on), device) as started:
        from phalanx.train import starting

        if dry_run or weights:
            print(starting.described(given, weights))
        else:
            conclude(starting.train(given if started is None else started.over(given)))


@app.command(cls=TaskVerb)
@_stoppable("every rank has ended, and nothing was concluded")
def prove(
    task: Annotated[str | None, typer.Argument(help=option.TASK)] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[LAYOUT]...", help="layouts, as with --layouts")] = None,
    layouts: Annotated[list[str], typer.Option(help="a layout, or all that --ranks allow")] = [],  # noqa: B006
    ranks: Annotated[int | None, typer.Option(help="how many ranks all layouts have; by default 4")] = None,
    steps: Annotated[int, typer.Option(help="how many steps are compared")] = 3,
    set_: Annotated[list[str], typer.Option("--set", metavar="NAME=VALUE", help="set a field of the task")] = [],  # noqa: B006
    dtype: Annotated[str | None, typer.Option(help="bf16: prove what is particular to that precision too")] = None,
    inject: Annotated[str | None, typer.Option(metavar="BUG", help="plant a known bug; list: say which")] = None,
    run: Annotated[Path | None, typer.Option(help="the run's folder; by default the next free one under runs/")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="do not check the task first; see docs/check.md")
    ] = False,
) -> None:
    """Show that a task trains under a layout as on one device, or say where and why it does not."""
    from phalanx.prove.job import ProofJob, listed
    from phalanx.streams import led_elsewhere

    if inject == "list":
        print(listed())
        return
    if json:
        led_elsewhere(os.dup(2), os.dup(2))  # what the task prints is not the object
    job = ProofJob.resolve(
        task=task, layouts=[*layouts, *(more or [])], assignments=set_, ranks=ranks, steps=steps, dtype=dtype,
        inject=inject, unchecked=unchecked,
    )  # fmt: skip
    raise SystemExit(job.run(run, as_text=not json))


@app.command()
@_stoppable("nothing was concluded")
def verify(
    run: Annotated[str, typer.Argument(help="a run's folder, that or the URL of its checkpoints, or token files")],
    json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Check a run's checkpoints, or token files: every byte read, every checksum and hash made again."""
    from phalanx.checkpoint.verify import verify
    from phalanx.data.token_manifest import verify_tokens
    from phalanx.progress import progress

    with progress() as show:
        verdict = verify_tokens(Path(run), show) or verify(run, show)
    print(verdict.to_json() if json else verdict)
    raise SystemExit(verdict.exit_code)


@app.command()
@_stoppable("nothing was exported")
def export(
    run: Annotated[Path, typer.Argument(help="a run's folder")],
    to: Annotated[Path, typer.Option(help="the folder to write; it must not be there, or be empty")],
    format: Annotated[
        str | None, typer.Option(help="safetensors, pt, or hf; by default hf where the model is Hugging Face's")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="which checkpoint; by default the last, or of a run that has ended the best")
    ] = None,
    best: Annotated[bool, typer.Option("--best", help="the best checkpoint, by keep_best's measure")] = False,
    weights: Annotated[
        str, typer.Option(metavar="NAME", help="model, or the average that a callback of this name keeps: ema")
    ] = "model",
    checkpoints: Annotated[str | None, typer.Option(help="where they lie; by default as the run says")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="of LoRA, the whole model that it makes of its base")] = False,
    set_: option.Set = [],  # noqa: B006
    trust: option.Trust = False,
) -> None:
    """Write a run's weights as safetensors, for torch.load, or as a folder that Hugging Face, or peft, reads."""
    from phalanx.progress import progress
    from phalanx.train.exporting import export_run

    with progress() as show:
        verdict = export_run(
            run, to, format, step, lambda n, of: show("exporting", n, of), checkpoints, merge, set_,
            best=best, weights=weights, trust=trust,
        )  # fmt: skip
    print(verdict)
    raise SystemExit(verdict.exit_code)


@app.command()
@_stoppable("nothing was concluded")
def bench(
    only: Annotated[list[str], typer.Option(metavar="NAME", help="one contender; may be given again")] = [],  # noqa: B006
    precision: Annotated[str | None, typer.Option(help="fp32, bf16, fp8; by default bf16 on a GPU")] = None,
    layers: Annotated[int | None, typer.Option(help="blocks of the model; by default 1.5B weights on a GPU")] = None,
    width: Annotated[int | None, typer.Option(help="of the model, a multiple of 64")] = None,
    length: Annotated[int | None, typer.Option(help="tokens of a sequence")] = None,
    batch: Annotated[int | None, typer.Option(help="sequences a step")] = None,
    vocabulary: Annotated[int | None, typer.Option(help="different tokens")] = None,
    experts: Annotated[int | None, typer.Option(help="in each block, each token going to 2; by default none")] = None,
    offload: Annotated[
        int | None, typer.Option(metavar="PERCENT", help="keep so much of the optimizer state on the host")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one")] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
) -> None:
    """Train a Llama's shape on this machine, with Phalanx and with its peers that are installed: who is faster."""
    from phalanx.bench.table import bench, setting_of

    sizes = {"layers": layers, "width": width, "length": length, "batch": batch, "vocabulary": vocabulary,
             "experts": experts}  # fmt: skip
    setting = setting_of(device, precision, offload, **sizes)
    table = bench(setting, only, lambda text: print(text, file=sys.stderr, flush=True))
    print(table.to_json() if json else f"\n{table}")
    raise SystemExit(0 if table.found else 3)


@app.command()
@_stoppable("nothing was concluded")
def why(
    run: Annotated[Path | None, typer.Argument(help=verbs.RUN)] = None,
    json: Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="and what each rank does, line by line")] = False,
) -> None:
    """Say why a run is stuck, dead, wrong or slow: which rank, where, and what to do."""
    from phalanx.launch import stacks as asking
    from phalanx.launch.standing import alive, run_at
    from phalanx.watch.why import why

    found = run_at(run)
    live = alive(found)
    missing = asking.unanswered(found) if stacks else ""
    verdict = why(found, stacks, live)
    if verdict.kind in ("stuck", "deadlock") and live and not stacks and not asking.unanswered(found):
        verdict = why(found, stacks, live)
    verdict.evidence += [missing] if missing else []
    print(verdict.to_json() if json else verdict)
    raise SystemExit(verdict.exit_code)


for _verb in (
    verbs.runs, verbs.status, verbs.cancel, _stoppable("the run goes on")(verbs.logs), watching.watch, watching.report,
    _stoppable("what was encoded is kept, and taken up by the same command")(cli_tokenize.tokenize), cli_new.new,
    _stoppable("no rank is left, and nothing was concluded")(cli_tune.tune),
    _stoppable("nothing was concluded")(cli_doctor.doctor), _stoppable("nothing was concluded")(cli_doctor.probe),
    _stoppable("nothing was concluded")(cli_evaluate.evaluate),
):  # fmt: skip
    app.command(cls=TaskVerb)(_verb)


def main() -> None:
    """Run a verb; what the user can mend is one message and an exit code, never our traceback."""
    from phalanx.watch.output import install

    out = install()
    learn_words(sys.argv[1:])
    code = exit_code()
    if lost := out.lost():
        print(f"phalanx: not all output could be written: {lost}. Make room, or send it elsewhere.", file=sys.stderr)
        code = code or 3
    raise SystemExit(code)


def exit_code() -> int:
    """What the verb came to; its message is printed."""
    try:
        try:
            os.getcwd()
        except OSError:
            raise CannotHere("the current folder is not there any more. Change to one that is.") from None
        app()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except (WrongUse, CannotHere) as error:
        print(printable(f"phalanx: {error}"), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        what = f"{error.filename}: " if error.filename is not None else ""
        told = redact(f"phalanx: {what}{error.strerror or error}. Mend that, or use another folder.")
        print(printable(told), file=sys.stderr)
        return 3
    except Exception as error:
        from phalanx.traces import folded
        from phalanx.user_code import is_users_line

        own = any(is_users_line(frame.filename) for frame in traceback.extract_tb(error.__traceback__))
        told = f"phalanx: {type(error).__name__}: {error}\n{folded(error)}" if own else traceback.format_exc()
        print(printable(redact(told)), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    main()  # as ``python -m phalanx`` does
