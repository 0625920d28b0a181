"""``compile=blocks``: the compiled step is the step, dropout masks included."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMPARE = """
from functools import partial
import torch
from torch import nn
import phalanx
from tests.parity import Summed
from tests.tasks import Digits

class Blocks(Digits):
    def model(self):
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2)]
        return nn.Sequential(*blocks, nn.Linear(4, 3))

def gradients(layout):
    found = {}
    with phalanx.Engine(Blocks(precision="float64"), layout, device="cpu") as engine:
        engine.callbacks.add(Summed(found.update))
        engine.step(next(engine.batches()))
    return found

torch.set_num_threads(1)
torch.compile = partial(torch.compile, backend="aot_eager")  # traced as ever; C++ kernels would take half a minute
expected = gradients("dp=1")
for layout in ("dp=1,compile=blocks", "dp=1,compile=blocks,recompute=full"):
    for name, found in gradients(layout).items():
        assert (found - expected[name]).abs().max() <= 1e-9 * expected[name].abs().max(), (layout, name)
"""


def test_a_compiled_step_is_the_step() -> None:
    """In a process of its own: the compiler leaves threads behind. What it makes of a GPU: benchmarks/gpu.py."""
    done = subprocess.run([sys.executable, "-c", COMPARE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


IN_8_BITS = """
from functools import partial
import torch
import phalanx
from phalanx.recipes.gpt import GPT

def losses(layout):
    task = GPT(precision="fp8", width=32, layers=3, length=16, megabytes=0.2, global_batch=4, steps=3)
    with phalanx.Engine(task, layout, device="cpu") as engine:
        return [engine.step(batch).loss for batch in engine.batches()], engine.spread.scales()

torch.set_num_threads(1)
expected, scales = losses("dp=1")
programs = []

def backend(graph, inputs):
    programs.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

torch.compile = partial(torch.compile, backend=backend)
found, compiled = losses("dp=1,compile=blocks")
assert all(abs(one - other) <= 1e-3 * one for one, other in zip(expected, found)), (expected, found)
for name, row in compiled["linears"].items():
    alone = scales["linears"][name]
    assert all(abs(one - other) <= 0.15 * other for one, other in zip(row[:3], alone)), (name, row, alone)
    assert row[3:] == alone[3:], (name, row, alone)
assert len(programs) == 2, programs  # all blocks alike: one that looks for its scales, and one that knows them
"""


def test_a_compiled_step_in_8_bits_is_that_step() -> None:
    done = subprocess.run([sys.executable, "-c", IN_8_BITS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


PACKED = """
import sys
from functools import partial
import torch
import phalanx
from phalanx.kernels import packed_attention
from phalanx.kernels.varlen import varlen
from phalanx.recipes.gpt import GPT
from phalanx.recipes.sft import SFT
from tests.kernels.sequences import as_torchs_kernel
from tests.parity import Summed

def gradients(layout):
    found = []
    if sys.argv[1] == "gpt":
        task = GPT(precision="float64", width=32, layers=3, length=64, megabytes=0.2, global_batch=4, steps=3)
    else:
        task = SFT(precision="float64", length=64, global_batch=4, steps=3)
    with phalanx.Engine(task, layout, device="cpu") as engine:
        engine.callbacks.add(Summed(lambda summed: found.append(dict(summed))))
        for batch in engine.batches():
            engine.step(batch)
    return found

torch.set_num_threads(1)
expected = gradients("dp=1")
kept = as_torchs_kernel()
packed_attention.dense = partial(packed_attention.laid_end_to_end, varlen)  # as on a GPU
programs = []

def backend(graph, inputs):
    programs.append(graph)
    return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

torch.compile = partial(torch.compile, backend=backend)
for layout in sys.argv[2:]:
    programs.clear()
    torch._dynamo.reset()
    for step, found in enumerate(gradients(layout)):
        for name, of in found.items():
            right = expected[step][name]
            assert (of - right).abs().max() <= 1e-9 * right.abs().max(), (layout, step, name)
    assert len(programs) == ("compile" in layout), (layout, len(programs))  # one for all blocks and documents
    assert all("varlen" in str(graph.graph) for graph in programs)
"""


@pytest.mark.parametrize(("task", "layouts"), [
    ("sft", ["dp=1,compile=blocks"]),
    pytest.param("gpt", ["dp=1,recompute=selective", "dp=1,compile=blocks,recompute=full"], marks=pytest.mark.every),
])  # fmt: skip
def test_packed_documents_are_compiled_once(task: str, layouts: list[str]) -> None:
    """By torch's own operation, with processors computing what a GPU's kernel would."""
    done = subprocess.run([sys.executable, "-c", PACKED, task, *layouts], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
