"""Fine-tuning beside Transformers and peft: the same packed conversations, tokens a second and memory, in turns.

    python benchmarks/sft.py [--only full|lora|qlora] [--layers N] [--steps N] [--rounds N] [--quick]

Full training, LoRA and QLoRA of the 1.5B Llama shape in bf16 on one GPU. Each in a process of its own, one after the
other in each round; the ratio is of medians. Theirs is a loop over a transformers model, with peft's LoRA, linears of 4
bits by bitsandbytes, bf16 autocast and fused AdamW; packed conversations are kept apart by positions, as transformers
has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from torch import Tensor, nn

import phalanx
from phalanx.bench.shape import Shape, hugging_face
from phalanx.data.supervised import Supervised
from phalanx.recipes.sft import SFT
from report import Figure, report

RATE, RANK, ALPHA = 1e-4, 16, 32.0
FASTER = 1.25
KINDS = ["full", "lora", "qlora"]
QUICK = Shape(layers=2, width=256, length=256, batch=2, vocabulary=4096)
Step = Callable[[], object]


def samples(shape: Shape) -> Supervised:
    """Conversations of 64 tokens up to half a sample, most of them short, an answer's two thirds of each counted."""
    draw = np.random.default_rng(0)
    documents = []
    for _ in range(40 * shape.batch * 8):
        size = int(np.clip(draw.lognormal(6.0, 0.8), 64, shape.length // 2))
        documents.append((draw.integers(0, shape.vocabulary, size), np.arange(size) >= size // 3))
    return Supervised(documents, shape.length)


@dataclass
class Packed(SFT):
    """The recipe on a model of that shape, with weights of its own."""

    shape: Shape | None = None

    def model(self) -> nn.Module:
        assert self.shape is not None
        return self.with_lora(hugging_face(self.shape))

    def pretrained(self) -> None:
        return None

    def data(self) -> Supervised:
        assert self.shape is not None
        return samples(self.shape)

    def held_out(self) -> None:
        return None

    def overview(self) -> tuple[dict[str, str], list[str]]:
        return {}, []

    @property
    def _pad(self) -> int:
        return 0


def ours(shape: Shape, kind: str, device: str) -> Iterator[Step]:
    task = Packed(
        shape=shape, length=shape.length, global_batch=shape.batch, learning_rate=RATE, steps=10_000,
        precision="bf16" if device == "cuda" else "fp32", four_bit=kind == "qlora",
        **({} if kind == "full" else {"lora": RANK, "lora_alpha": ALPHA}),
    )  # fmt: skip
    with phalanx.Engine(task, "dp=1,compile=blocks" if device == "cuda" else "dp=1", device=device) as engine:
        batches = engine.batches()
        yield lambda: engine.step(next(batches))


def in_four_bits(model: nn.Module) -> None:
    """Linears but the head as bitsandbytes has them; they are encoded as they are moved to a GPU."""
    import bitsandbytes

    for name, module in list(model.named_modules()):
        for child, linear in list(module.named_children()):
            if isinstance(linear, nn.Linear) and child != "lm_head":
                narrow = bitsandbytes.nn.Linear4bit(
                    linear.in_features, linear.out_features, False, torch.bfloat16, quant_type="nf4"
                )
                narrow.load_state_dict({"weight": linear.weight.data})
                setattr(model.get_submodule(name), child, narrow)


def theirs(shape: Shape, kind: str, device: str) -> Iterator[Step]:
    with torch.device("cpu" if kind == "qlora" else device):
        model = hugging_face(shape)
    if kind != "full":
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model.to(torch.bfloat16)
        if kind == "qlora":
            in_four_bits(model)
            model.to(device)
        model = get_peft_model(
            model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM")
        )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, RATE, fused=True)
    data = samples(shape)
    numbers = iter(range(10**9))

    def step() -> Tensor:
        rows = [data[next(numbers) % len(data)] for _ in range(shape.batch)]
        tokens, targets, positions = (
            torch.stack([torch.as_tensor(row[name]) for row in rows]).to(device, non_blocking=True)
            for name in ("tokens", "targets", "positions")
        )
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    yield step


def measure(who: str, kind: str, shape: Shape, steps: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    for step in (ours if who == "ours" else theirs)(shape, kind, device):
        for _ in range(4):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / steps
        gib = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
        print(json.dumps({"tokens": shape.tokens / seconds, "ms": 1e3 * seconds, "gib": gib}))


def compared(kind: str, options: argparse.Namespace) -> Iterator[Figure]:
    found: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    for _ in range(options.rounds):
        for who, each in found.items():
            told = [word for word in sys.argv[1:] if word.startswith("--quick")]
            command = [sys.executable, __file__, "--one", who, "--only", kind, *told]
            command += ["--steps", str(options.steps), *(["--layers", str(options.layers)] if options.layers else [])]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{who}, {kind}:\n{done.stderr[-3000:]}")
            each.append(json.loads(done.stdout.splitlines()[-1]))
    ours, theirs = ({name: statistics.median(one[name] for one in each) for name in each[0]} for each in found.values())
    note = f"{ours['tokens']:,.0f} tokens/s ({ours['ms']:.1f} ms) to {theirs['tokens']:,.0f} ({theirs['ms']:.1f} ms)"
    bar = None if options.quick else 1 / FASTER
    yield Figure(f"{kind}, time to that of Transformers and peft", ours["ms"] / theirs["ms"], bar, note)
    note = f"{ours['gib']:.1f} GiB to {theirs['gib']:.1f}"
    yield Figure(
        f"{kind}, memory to theirs", ours["gib"] / max(1e-9, theirs["gib"]), None if options.quick else 1.0, note
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--one", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = QUICK if options.quick else Shape()
    shape = shape.changed(layers=options.layers)
    if options.one:
        measure(options.one, options.only, shape, options.steps)
        return
    kinds = [options.only] if options.only else KINDS
    report([figure for kind in kinds for figure in compared(kind, options)])


if __name__ == "__main__":
    main()
