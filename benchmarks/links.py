"""Training over slow links, beside torch's DDP: seconds a step, bytes that leave a host, and the loss on held-out text.

    python benchmarks/links.py [--quick] [--mbits 100] [--round-trip 0.05] [--hosts 4] [--comm auto int8 ...]
        [--layout dp|fsdp] [--length 128] [--steps 400] [--seeds 0 1 2] [--drop 50] [--out data.json]

Hosts are network namespaces joined by a link of the given rate (needs root, ``ip`` and ``tc``; ``--mbits 0``: as fast
as it goes), a rank on each, or several. A byte-level transformer of 10 million weights learns the source of Python's
standard library, 2 sequences of 128 a rank and step (``--length``: of fewer, where more ranks than cores are here). All
contestants are in the same processes and take turns in segments of a few steps: the machine may be busy, but it is busy
for all. ``exact`` as first contestant over ``fsdp`` stands for what DDP is to ``dp``. ``exact@8`` has buckets of 8 MiB,
however large those of others are. Of sites that train by themselves (``local:H``, ``diloco:H``) whole rounds are timed,
and the mean of a step counts: the median would be of one in which nothing is sent.

With ``--steps`` all are trained so far and their held-out losses compared. What a method learns does not depend on the
link, unless it is chosen by it: all but ``auto`` go the rest of their way on one that is not shaped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from tests.hosts import missing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import phalanx
from phalanx.launch.environment import Environment
from phalanx.local_updates import LocalUpdates
from phalanx.parallel.weights import bucket
from phalanx.recipes.gpt import GPT
from report import Figure, report
from slow_network import SlowNetwork, bytes_sent, wait_for

SHAPE = {"width": 384, "layers": 6, "heads": 6, "kv_heads": 6, "length": 128, "megabytes": 8.0, "learning_rate": 3e-4}
A_RANK = 2
DDP = "ddp"
ADAPTS = 20
"""Steps in which ``auto`` must have found out that a link has dropped."""


class TorchDDP:
    """What one writes with torch alone: DDP with buckets of 25 MiB, and nothing else that is sent."""

    def __init__(self, task: GPT, weights: dict[str, torch.Tensor]) -> None:
        self.task, self.data = task, task.data()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.plain = task.model()
        self.plain.load_state_dict(weights)
        self.model = DistributedDataParallel(self.plain, bucket_cap_mb=25)
        self.optimizer, self.schedule = task.optimizer(list(self.model.parameters())), task.schedule()
        self.rates = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, number: int, ids: Any) -> float:
        mine = ids[self.rank * len(ids) // self.world : (self.rank + 1) * len(ids) // self.world]
        samples = [self.data[int(index)] for index in mine]
        batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
        loss = phalanx.losses.cross_entropy(self.model(**self.task.inputs(batch)), batch["targets"])
        mean = loss.total / loss.count
        mean.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.task.clip)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * self.schedule(number)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(mean.detach())

    def weights(self) -> dict[str, torch.Tensor]:
        return self.plain.state_dict()


class Contestant:
    """One of those that take turns, and what was seen of it."""

    def __init__(self, name: str, layout: str, task: GPT) -> None:
        self.name, self.seconds, self.bytes, self.losses = name, list[float](), list[float](), list[float]()
        method, _, megabytes = name.partition("@")
        most = int(megabytes) << 20 if megabytes else bucket.GLOO_BYTES
        with mock.patch.multiple(bucket, BUCKET_BYTES=max(most, bucket.BUCKET_BYTES), GLOO_BYTES=most):
            self.engine = phalanx.Engine(task, f"{layout},comm={method}", device="cpu", timeout=timedelta(minutes=5))
        self._batches, self.local = self.engine.batches(), self.engine.layout.local

    def step(self) -> float:
        return self.engine.step(next(self._batches)).loss

    def weights(self) -> dict[str, torch.Tensor]:
        return self.engine.whole_weights()

    def chosen(self) -> str:
        """What `auto` sends by now."""
        return self.engine.auto_comm.method if self.name == "auto" else self.name

    def why(self) -> list[str]:
        """What `auto` said whenever it chose."""
        return [str(each).strip() for each in self.engine.auto_comm.news]

    def close(self) -> None:
        self.engine.close()

    def whole(self, steps: int) -> int:
        """So many, or with sites as many more as a round takes."""
        return steps if self.local is None else -(-steps // self.local.every) * self.local.every

    def run(self, steps: int, timed: bool = True) -> None:
        """A segment; the first step of it is not timed, but of sites: others had the processor's caches."""
        dist.barrier()
        for number in range(steps):
            before, began = bytes_sent(), time.perf_counter()
            loss = self.step()
            seconds = time.perf_counter() - began
            if (number or self.local is not None) and timed:
                self.seconds.append(seconds)
                self.bytes.append(bytes_sent() - before)
            self.losses.append(loss)
        dist.barrier()


class DDPContestant(Contestant):
    """DDP, with the samples and first weights that Phalanx has."""

    def __init__(self, task: GPT, other: Contestant) -> None:
        self.name, self.seconds, self.bytes, self.losses, self.local = DDP, [], [], [], None
        self._theirs, self._order = TorchDDP(task, other.weights()), other.engine.order

    def step(self) -> float:
        number = len(self.losses)
        return self._theirs.step(number, self._order.ids(number))

    def weights(self) -> dict[str, torch.Tensor]:
        return self._theirs.weights()

    def chosen(self) -> str:
        return DDP

    def why(self) -> list[str]:
        return []

    def close(self) -> None:
        pass


@torch.no_grad()
def held_out_loss(task: GPT, weights: dict[str, torch.Tensor]) -> float:
    """Per byte, of all the text that was not trained on."""
    model, data = task.model(), task.held_out()
    model.load_state_dict(weights)
    model.eval()
    total = count = 0.0
    for index in range(0, len(data), 8):
        rows = [data[i] for i in range(index, min(index + 8, len(data)))]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        loss = phalanx.losses.cross_entropy(model(**task.inputs(batch)), batch["targets"])
        total, count = total + float(loss.total), count + float(loss.count)
    return total / count


def on_rank(words: dict[str, Any]) -> None:
    """What each rank does."""
    torch.set_num_threads(1)
    environment = Environment.detect()
    environment.join(torch.device("cpu"), timedelta(minutes=10))
    shape = SHAPE | {"length": words["length"]}
    task = GPT(**shape, global_batch=A_RANK * environment.world, seed=words["seed"], steps=max(words["steps"], 400))
    ours = [Contestant(name, words["layout"], task) for name in words["comm"]]
    every = [*([DDPContestant(task, ours[0])] if words["ddp"] else []), *ours]
    for contestant in every:
        contestant.run(contestant.whole(2), timed=False)  # connections, buffers, and what is measured in first steps
    for number in range(words["rounds"]):
        for contestant in every:
            contestant.run(contestant.whole(words["segment"]))
        took = (f"{each.name} {1e3 * usual(each.name, each.seconds):.0f} ms" for each in every)
        _say(f"{number + 1} of {words['rounds']} rounds, a step: {', '.join(took)}")
    found: dict[str, Any] = {}
    if words["drop"]:
        _asked(words, "drop")
        found["dropped at"] = {each.name: len(each.seconds) for each in every}
        for contestant in every[-1:]:
            contestant.run(words["after"])
    held_out: dict[str, float | None] = {}
    if words["steps"]:
        for shaped in (False, True):
            _asked(words, "shaped" if shaped else "free")
            for contestant in every:
                if shaped == (contestant.name == "auto"):
                    held_out[contestant.name] = _learned(contestant, words["steps"], task)
    if environment.rank == 0:
        for contestant in every:
            found[contestant.name] = {
                "seconds": contestant.seconds, "bytes": contestant.bytes, "losses": contestant.losses,
                "chosen": contestant.chosen(), "why": contestant.why(), "held out": held_out.get(contestant.name),
            }  # fmt: skip
        Path(words["results"]).write_text(json.dumps(found))
    dist.barrier()
    for contestant in every:
        contestant.close()
    environment.leave()


def _learned(contestant: Contestant, steps: int, task: GPT) -> float | None:
    """The rest of the way: the held-out loss at its end, on the first rank."""
    while (done := len(contestant.losses)) < steps:
        contestant.run(min(100, steps - done), timed=False)
        _say(f"{contestant.name}: step {len(contestant.losses)} of {steps}, loss {contestant.losses[-1]:.4f}")
    weights = contestant.weights()
    if dist.get_rank():
        return None
    loss = held_out_loss(task, weights)
    _say(f"{contestant.name}: held-out loss {loss:.4f}")
    return loss


def _say(words: str) -> None:
    """Of a long run, how far it is."""
    if dist.get_rank() == 0:
        print(words, file=sys.stderr, flush=True)


def _asked(words: dict[str, Any], what: str) -> None:
    """Have the link changed, by who has made it, before anybody goes on."""
    path = Path(words["results"]).with_suffix(f".{what}")
    dist.barrier()
    if dist.get_rank() == 0:
        path.touch()
    while not path.with_suffix(f".{what}.done").exists():
        time.sleep(0.05)
    dist.barrier()


def run_hosts(options: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The contestants' results on hosts that are made for it."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        words = {
            "seed": seed, "comm": options.comm, "layout": f"{options.layout}={options.hosts * options.ranks}",
            "ddp": options.layout == "dp", "rounds": options.rounds, "segment": options.segment,
            "length": options.length, "steps": options.steps, "drop": bool(options.drop), "after": options.after,
            "results": str(results),
        }  # fmt: skip
        with (
            SlowNetwork(options.hosts, Path(folder), options.mbits, options.round_trip) as network,
            network.ranks(__file__, words, options.ranks) as ranks,
        ):
            _attend(network, ranks, results, options)
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def _attend(
    network: SlowNetwork, ranks: list[subprocess.Popen[bytes]], results: Path, options: argparse.Namespace
) -> None:
    """Change the link when ranks ask for it, until they are done."""
    rates = {"free": 0.0, "shaped": options.mbits, "drop": options.drop}
    while any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            raise SystemExit("a rank has failed: see above")
        for what, mbits in rates.items():
            path = results.with_suffix(f".{what}")
            if path.exists():
                path.unlink()
                network.shape(mbits)
                path.with_suffix(f".{what}.done").touch()
        time.sleep(0.05)
    wait_for(ranks)


def usual(name: str, values: list[float]) -> float:
    """What counts of a contestant's steps."""
    return statistics.mean(values) if LocalUpdates.parse(name) else statistics.median(values)


def usual_of(runs: list[dict[str, Any]], name: str, what: str) -> float:
    """Seconds or bytes of a contestant's step, before the link drops."""
    return usual(name, [value for run in runs for value in run[name][what][: run.get("dropped at", {}).get(name)]])


def figures(options: argparse.Namespace, runs: list[dict[str, Any]]) -> Iterator[Figure]:
    """Beside the first contestant: its share of seconds and bytes, and how much higher the loss is."""
    names = [name for name in runs[0] if name != "dropped at"]
    first = names[0]
    link = f"{options.mbits:g} Mbit/s" if options.mbits else "an unshaped link"
    link += f", {1e3 * options.round_trip:g} ms" if options.round_trip else ""
    of_step = partial(usual_of, runs)

    for name in names:
        seconds, sent = of_step(name, "seconds"), of_step(name, "bytes")
        chosen = sorted({run[name]["chosen"] for run in runs} - {name})
        note = f"{1e3 * seconds:.0f} ms a step, {sent / 1e6:.3g} MB" + (
            f", chose {', '.join(chosen)}" if chosen else ""
        )
        faster = seconds / of_step(first, "seconds")
        yield Figure(f"{name}: step to {first}'s, {link}", faster, bar(options, name), f"{note}, {1 / faster:.2f}x")
        if name != first:
            fewer = sent / of_step(first, "bytes")
            note = f"1/{1 / fewer:.2f}"
            yield Figure(f"{name}: bytes to {first}'s", fewer, 1 / 7 if (name, first) == ("int4", DDP) else None, note)
        if options.steps and name != first:
            higher = [run[name]["held out"] / run[first]["held out"] - 1 for run in runs]
            note = ", ".join(f"{run[name]['held out']:.4f} to {run[first]['held out']:.4f}" for run in runs)
            yield Figure(
                f"{name}: held-out loss above {first}'s after {options.steps} steps", statistics.mean(higher),
                0.005 if name == "auto" else 0.05 if name.startswith("diloco") else None, note,
            )  # fmt: skip


def adapted(options: argparse.Namespace, runs: list[dict[str, Any]]) -> Iterator[Figure]:
    """After the link has dropped: steps until the last contestant sends a quarter less or more, of the slowest run."""
    name, took, seconds = list(runs[0])[-1], list[int](), list[float]()
    for run in runs:
        at, sent = run["dropped at"][name], run[name]["bytes"]
        usual = statistics.median(sent[at // 2 : at])
        fewer = [step for step, each in enumerate(sent[at:]) if each <= 0.75 * usual]
        took.append(fewer[0] if fewer else len(sent) - at)
        seconds += [run[name]["seconds"][at], statistics.median(run[name]["seconds"][at:][-10:])]
    note = f"{1e3 * seconds[-2]:.0f} ms a step at first, {1e3 * seconds[-1]:.0f} in the end"
    yield Figure(f"{name}: steps until it sends less after a drop to {options.drop:g} Mbit/s", max(took), ADAPTS, note)


def bar(options: argparse.Namespace, name: str) -> float | None:
    """What a step may take, of the first contestant's."""
    if options.layout == "fsdp":
        return 1 / 3 if name == "int8" and options.mbits == 100 else None
    if name.startswith("diloco"):
        return 1 / 12 if options.mbits == 100 else None
    if name != "auto":
        return None
    return {0: 1 / 0.98, 1000: 1 / 1.4, 100: 1 / 5}.get(options.mbits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--mbits", type=float, default=100, help="Mbit/s of each host's link; 0: not shaped")
    parser.add_argument("--round-trip", type=float, default=0, help="seconds")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--layout", choices=["dp", "fsdp"], default="dp")
    parser.add_argument("--length", type=int, default=SHAPE["length"], help="bytes of a sequence")
    parser.add_argument("--comm", nargs="+", default=["exact", "int8", "int4"])
    parser.add_argument("--steps", type=int, default=0, help="train so far, and compare losses")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, default=4, help="segments of each contestant")
    parser.add_argument("--segment", type=int, default=5, help="steps of one")
    parser.add_argument("--drop", type=float, default=0, help="Mbit/s that the link falls to in the end")
    parser.add_argument("--after", type=int, default=40, help="steps of the last contestant after that")
    parser.add_argument("--out", type=Path, help="a JSON file of all that was seen, for pictures")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        on_rank(json.loads(options.rank_of))
        return
    if missing():
        sys.exit(f"not run: {missing()}")
    if options.quick:
        options.rounds, options.segment = 2, 3
    runs = [run_hosts(options, seed) for seed in options.seeds]
    if options.out:
        settings = {name: value for name, value in vars(options).items() if name not in ("out", "rank_of")}
        options.out.write_text(json.dumps({"settings": settings, "runs": runs}))
    report([*figures(options, runs), *(adapted(options, runs) if options.drop else ())])


if __name__ == "__main__":
    main()
