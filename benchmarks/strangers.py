"""A run on two hosts while strangers are at every port its supervisors listen at, beside the same run left alone.

    python benchmarks/strangers.py [--quick]

Strangers send random bytes, random JSON, deep JSON and wrong proofs, open connections and leave them idle, a thousand
at a time, for 60 s (--quick: 8 s). They must neither cost the run a restart or a bit of its weights nor learn anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from phalanx.launch.lines import CHALLENGE_BYTES, MAGIC
from report import Figure, report

IDLE = 1000

TASK = """
import time
from dataclasses import dataclass
import torch
from torch import nn
import phalanx


@dataclass
class Slow(phalanx.Task):
    global_batch: int = 16
    pause: float = 0.05

    def model(self):
        return nn.Sequential(nn.Linear(8, 13), nn.ReLU(), nn.Linear(13, 3))

    def data(self):
        made = torch.Generator().manual_seed(1)
        return phalanx.data.Arrays(x=torch.randn(331, 8, generator=made), y=torch.randint(0, 3, (331,), generator=made))

    def inputs(self, batch):
        time.sleep(self.pause)
        return batch["x"]

    def loss(self, output, batch):
        return phalanx.losses.cross_entropy(output, batch["y"])
"""


def hosts(folder: Path, run: str, seconds: float, address: str) -> list[subprocess.Popen[bytes]]:
    """Two supervisors with two ranks each, for about so many seconds."""
    words = [
        "train", "slow.py", "--layout", "dp=4", "--on", "local:2", "--device", "cpu", "--run", run,
        "--steps", str(int(seconds / 0.05)), "--max-nodes", "2", "--min-nodes", "2", "--meet", address,
        "--save-steps", "100",
    ]  # fmt: skip
    found = []
    for name in ("a", "b"):
        with (folder / f"{run}-{name}").open("wb") as out:
            command = [sys.executable, "-m", "phalanx", *words, "--host", name]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            found.append(subprocess.Popen(command, cwd=folder, stdout=out, stderr=out, env=env))
    return found


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def listening(pid: int) -> set[int]:
    """The ports a process listens at."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return {int(f[1].rpartition(":")[2], 16) for f in fields if f[3] == "0A" and f[9] in inodes}


class Strangers:
    """One thread a manner, at ports in turn, until told to stop."""

    def __init__(self, ports: list[int]) -> None:
        self.ports, self.stop = ports, threading.Event()
        self.tried: Counter[str] = Counter()
        self.heard: set[bytes] = set()
        """What came back, but for nonces."""
        manners = (self.idle, self.bytes, self.json, self.deep, self.wrong_proof, self.crowd)
        self.threads = [threading.Thread(target=self.repeat, args=(manner, n)) for n, manner in enumerate(manners)]
        for thread in self.threads:
            thread.start()

    def repeat(self, manner: object, seed: int) -> None:
        chosen = random.Random(seed)
        while not self.stop.is_set():
            with suppress(OSError):
                assert callable(manner)
                manner(chosen)
                self.tried[manner.__name__] += 1
            time.sleep(0.002)

    def say(self, chosen: random.Random, words: bytes) -> None:
        with socket.create_connection(("127.0.0.1", chosen.choice(self.ports)), timeout=1.0) as sock:
            with suppress(OSError):
                sock.sendall(words)
            answer = b""
            with suppress(OSError):
                while some := sock.recv(1 << 12):
                    answer += some
            self.heard.add(answer[: len(MAGIC)] + answer[CHALLENGE_BYTES:])

    def bytes(self, chosen: random.Random) -> None:
        self.say(chosen, chosen.randbytes(chosen.choice((1, 40, 72, 200, 1 << 16))))

    def json(self, chosen: random.Random) -> None:
        odd = [None, 7, [], {}, ["Hello", {}], {"hello": {"host": []}}, {"join": {}}, {"hosts": 7}, "x" * 1000]
        self.say(chosen, json.dumps([chosen.choice(odd) for _ in range(20)]).encode() + b"\n")

    def deep(self, chosen: random.Random) -> None:
        self.say(chosen, b"[" * 200_000 + b"\n")

    def wrong_proof(self, chosen: random.Random) -> None:
        self.say(chosen, MAGIC + chosen.randbytes(64))

    def idle(self, chosen: random.Random) -> None:
        """A thousand connections that say nothing."""
        port = chosen.choice(self.ports)
        held = []
        with suppress(OSError):
            while len(held) < IDLE and not self.stop.is_set():
                held.append(socket.create_connection(("127.0.0.1", port), timeout=1.0))
        self.tried["idle connections"] += len(held)
        self.stop.wait(1.0)
        for sock in held:
            sock.close()

    def crowd(self, chosen: random.Random) -> None:
        for _ in range(50):
            socket.create_connection(("127.0.0.1", chosen.choice(self.ports)), timeout=1.0).close()
        self.tried["hung up at once"] += 50

    def end(self) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()


def outcome(folder: Path, run: str) -> tuple[str, int, float]:
    """The weights' hash, generations, and the median step's seconds."""
    certificate = json.loads((folder / run / "final" / "certificate.json").read_text())
    events = (folder / run / "events" / "rank-00000.jsonl").read_text().splitlines()
    times = [event["time"] for event in map(json.loads, events) if event["kind"] == "step"]
    gaps = sorted(b - a for a, b in pairwise(times))
    weights = hashlib.sha256((folder / run / "final" / "model.safetensors").read_bytes()).hexdigest()
    return weights, certificate["generations"], gaps[len(gaps) // 2]


def figures(seconds: float) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "slow.py").write_text(TASK)
        for one in hosts(folder, "calm", seconds, free_address()):
            assert one.wait() == 0, (folder / "calm-a").read_text()
        address = free_address()
        running = hosts(folder, "rough", seconds, address)
        while not (folder / "rough" / "events").exists():
            time.sleep(0.05)
            assert all(one.poll() is None for one in running), (folder / "rough-a").read_text()
        ports = sorted({int(address.rpartition(":")[2])}.union(*(listening(one.pid) for one in running)))
        strangers = Strangers(ports)
        codes = [one.wait() for one in running]
        strangers.end()
        said = "".join((folder / f"rough-{name}").read_text() for name in "ab")
        assert codes == [0, 0], said
        (calm, _, before), (rough, generations, after) = outcome(folder, "calm"), outcome(folder, "rough")
    tried = ", ".join(f"{count:,} {name}" for name, count in sorted(strangers.tried.items()))
    notes = [line for line in said.splitlines() if "without proof" in line]
    yield Figure("restarts under strangers", generations - 1, 0.0, f"{tried}; at {len(ports)} ports")
    yield Figure("weights differ from the run left alone", float(calm != rough), 0.0)
    yield Figure("answers with more than a name and a nonce", len(strangers.heard - {b"", MAGIC}), 0.0)
    yield Figure("tracebacks", said.count("Traceback"), 0.0, f"{len(notes)} notes")
    yield Figure(
        "median step, to the run left alone", after / before, None, f"{1e3 * before:.0f} to {1e3 * after:.0f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    report(list(figures(8.0 if parser.parse_args().quick else 60.0)))


if __name__ == "__main__":
    main()
