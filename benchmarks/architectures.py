"""Every architecture of the installed transformers, made tiny by rule: two training steps, and a proof of two replicas.

    python benchmarks/architectures.py [--quick] [--only PATTERN ...] [--cache FILE] [--limit SECONDS] [--at-once N]

Each is tried in a process of its own, two at a time. What came out is appended to a file (--cache; by default one of
this commit's and these versions'), and a second run goes on where the first was stopped; without the file it begins
anew. --only: patterns of model types, such as 'qwen*'; those are tried again. --quick: a few, in under a minute.

Which models, sizes and inputs: `tests/tiny_models.py`. An architecture for which no rule finds any, or that needs a
package that is not installed, is counted apart. A refusal is an error that says what to do; anything else that keeps a
model from its steps is a crash. A finding of a proof is a false alarm: two replicas of these models are right, but
for what is in OWN_STATISTICS.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import transformers
from tests.tiny_models import FOUND, Architecture, NotTiny, architectures, tiny

import phalanx
from phalanx.prove.proof import prove
from report import Figure, report

QUICK = ("bert", "clip", "gpt2", "llama4_text", "mamba", "opt", "vit", "whisper")
STEPS, REFUSED, CRASHED, LATE = "steps", "refused", "crashes", "out of time"
EQUAL, FINDING, NOTHING = "equal", "FINDING", "no proof"
OWN_STATISTICS = ("ibert",)
"""Models that note in buffers what their activations range over, which each replica does for its own samples."""
LEAST = 1.3
"""Percent of architectures that may not step."""


@dataclass
class Outcome:
    """What came of one architecture."""

    kind: str
    model: str = ""
    weights: int = 0
    inputs: str = ""
    apart: str = ""
    """Why it is counted apart: no rule makes it tiny, or a package is missing."""
    step: str = ""
    proof: str = ""
    why: str = ""
    seconds: float = 0.0


def outcome(kind: str) -> Outcome:
    """In this process: made tiny, two steps on one device, and two replicas proven."""
    found = Outcome(kind)
    try:
        made = FOUND[kind] = tiny(kind)
    except NotTiny as none:
        found.apart, found.why = "no rule", str(none)
        return found
    except ImportError as missing:
        found.apart, found.why = "a package is missing", _first(missing)
        return found
    found.model, found.weights, found.inputs = made.model.__name__, made.weights, ", ".join(made.inputs)
    try:
        with phalanx.Engine(Architecture(kind=kind), "dp=1", device="cpu") as engine:
            losses = [engine.step(batch).loss for batch, _ in zip(engine.batches(), range(2), strict=False)]
        found.step = STEPS if len(losses) == 2 and all(map(torch.isfinite, map(torch.tensor, losses))) else CRASHED
        found.why = "" if found.step == STEPS else f"losses {losses}"
    except (phalanx.WrongUse, phalanx.CannotHere) as refusal:
        found.step, found.why = REFUSED, _first(refusal)
    except Exception as error:
        found.step, found.why = CRASHED, f"{type(error).__name__}: {_first(error)}"
    if found.step == STEPS:
        found.proof, found.why = proven(kind)
    return found


def proven(kind: str) -> tuple[str, str]:
    """What a proof of two replicas says, and why."""
    try:
        proof = prove(Architecture(kind=kind), ["dp=2"])
    except (phalanx.WrongUse, phalanx.CannotHere) as refusal:
        return REFUSED, _first(refusal)
    except Exception as error:
        return CRASHED, f"{type(error).__name__}: {_first(error)}"
    if not proof.results:
        return NOTHING, proof.summary
    (result,) = proof.results
    if result.finding is not None and kind in OWN_STATISTICS and result.finding.rung == "buffers":
        return "own statistics", result.finding.cause
    if result.finding is not None:
        return FINDING, f"{result.finding.rung}: {result.finding.name}; {result.finding.cause}"
    return result.verdict, result.reason or ""


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0][:400]


class Tries:
    """Processes, so many at a time, each of which writes down what came of one architecture."""

    def __init__(self, folder: Path, limit: float, at_once: int) -> None:
        self.folder, self.limit, self.at_once = folder, limit, at_once
        self.running: dict[int, tuple[str, float]] = {}

    def of(self, kinds: list[str]) -> Iterator[Outcome]:
        waiting = list(kinds)
        while waiting or self.running:
            while waiting and len(self.running) < self.at_once:
                self._start(waiting.pop(0))
            for pid, (kind, began) in list(self.running.items()):
                ended, _ = os.waitpid(pid, os.WNOHANG)
                late = not ended and time.monotonic() - began > self.limit
                if late:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                if ended or late:
                    del self.running[pid]
                    yield self._ended(kind, time.monotonic() - began, late)
            time.sleep(0.05)

    def _start(self, kind: str) -> None:
        pid = os.fork()
        if pid:
            self.running[pid] = kind, time.monotonic()
            return
        try:
            os.setsid()  # so that its ranks end with it
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            (self.folder / kind).write_text(json.dumps(asdict(outcome(kind))))
        finally:
            os._exit(0)

    def _ended(self, kind: str, seconds: float, late: bool) -> Outcome:
        file = self.folder / kind
        found = (
            Outcome(**json.loads(file.read_text())) if file.exists() else Outcome(kind, step=LATE if late else CRASHED)
        )
        found.seconds = seconds
        if not file.exists():
            found.why = f"nothing after {seconds:.0f} s" if late else "its process ended without a word"
        return found


def default_cache() -> Path:
    here = Path(__file__).parent
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=here, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    versions = f"{transformers.__version__}-{torch.__version__}".replace("+", "-")
    return Path(tempfile.gettempdir()) / f"phalanx-architectures-{commit}-{versions}.jsonl"


def told(found: Outcome) -> str:
    state = found.apart or (found.step if found.step != STEPS else f"steps, {found.proof}")
    return f"{found.kind:<34} {found.model:<48} {state:<24} {found.seconds:5.0f} s  {found.why[:160]}"


def figures(every: list[Outcome]) -> Iterator[Figure]:
    tried = [found for found in every if not found.apart]
    apart = Counter(found.apart for found in every if found.apart)
    steps, proofs = Counter(found.step for found in tried), Counter(found.proof for found in tried if found.proof)
    note = ", ".join(f"{count} {what}" for what, count in apart.items())
    yield Figure("architectures made tiny by rule", len(tried), None, f"of {len(every)}: {note}" if note else "")
    share = 100 * (1 - steps[STEPS] / max(1, len(tried)))
    said = ", ".join(f"{count} {what}" for what, count in steps.most_common())
    yield Figure("that do not take two steps at dp=1, percent", share, LEAST, said)
    yield Figure("that crash, and are not refused", steps[CRASHED] + steps[LATE], 0.0)
    said = ", ".join(f"{count} {what}" for what, count in proofs.most_common())
    yield Figure("false findings of proofs at dp=2", proofs[FINDING], 0.0, said)
    yield Figure("proofs that crash", proofs[CRASHED], 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="PATTERN")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument("--at-once", type=int, default=2, metavar="N")
    options = parser.parse_args()
    cache = options.cache or default_cache()
    kinds = [kind for kind in architectures() if not options.quick or kind in QUICK]
    chosen = [kind for kind in kinds if any(fnmatch.fnmatch(kind, pattern) for pattern in options.only or ["*"])]
    known: dict[str, Outcome] = {}
    if cache.exists() and not options.only and not options.quick:
        known = {
            found.kind: found for line in cache.read_text().splitlines() for found in [Outcome(**json.loads(line))]
        }
        print(f"{len(known)} were tried before: {cache}")
    warm_up()
    with tempfile.TemporaryDirectory() as folder, cache.open("a") as written:
        for found in Tries(Path(folder), options.limit, options.at_once).of([k for k in chosen if k not in known]):
            known[found.kind] = found
            written.write(json.dumps(asdict(found)) + "\n")
            written.flush()
            print(told(found), flush=True)
    every = [known[kind] for kind in chosen]
    print("\nNot equal under dp=2, or not stepping:\n")
    for found in every:
        if not found.apart and found.proof != EQUAL:
            print(told(found))
    report(list(figures(every)))


def warm_up() -> None:
    """Import what nearly every model needs, once, and compute nothing: processes are forked from this one."""
    import transformers.generation
    import transformers.masking_utils
    import transformers.modeling_utils
    import transformers.models.llama.modeling_llama

    assert transformers.modeling_utils
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity(logging.CRITICAL)
    torch.set_num_threads(1)
    gc.freeze()


if __name__ == "__main__":
    main()
