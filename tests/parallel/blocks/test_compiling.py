"""``compile=blocks`` along every axis: like one device, in few programs, with the collectives of plain blocks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from phalanx import Layout
from tests.ports import free_port

RUN = """
import sys
from datetime import timedelta
from functools import partial
import torch
import torch.distributed as dist
from phalanx import Layout
from phalanx.parallel.communication.traffic import Traffic
from phalanx.parallel.weights import bucket
from phalanx.prove.reference.activations import round_activations
from tests import parity

bucket.BUCKET_BYTES = 1 << 12  # several buckets

class Alike(parity.HostileLanguage):
    def data(self):
        return [{"tokens": (t := (torch.arange(9) * (3 + i)) % 37), "targets": t.roll(-1)} for i in range(32)]

class AlikeMixture(parity.Mixture):
    data = Alike.data

def train(rank, world, layout, programs, backend):
    made = []
    def noted(graph, inputs):
        made.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)
    plain = torch.compile
    torch.compile = lambda rest: plain(rest, backend=noted)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), world, rank == 0, timedelta(seconds=300))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    kind = AlikeMixture if layout.ep > 1 else Alike
    task = kind(global_batch=16, steps=3, layers=max(4, layout.stages))
    expected = parity.reference(task, observe=partial(round_activations, task, layout))
    import phalanx
    trace, sent, known = parity.Trace(), [], []
    for compiled in (True, False):
        traffic = Traffic()
        chosen = layout if compiled else phalanx.Layout.parse(str(layout).replace(",compile=blocks", ""))
        with phalanx.Engine(task, chosen, device="cpu", traffic=traffic) as engine:
            found = parity.Trace()
            engine.callbacks.add(parity.Summed(lambda whole: found.gradients.append(parity._kept(whole))))
            for batch in engine.batches():
                metrics = engine.step(batch)
                found.losses.append(metrics.loss)
                found.norms.append(metrics.grad_norm)
                known.append(len(made))
            found.weights.append(parity._kept(engine.whole_weights()))
        off = parity.difference(found, expected)
        assert off[0] < 1e-9, (chosen, off)
        sent.append((traffic.calls, traffic.sent))
    assert sent[0] == sent[1], sent
    assert known[0] == known[-1] <= programs, known  # those of the first step are used in all others, by all blocks
    dist.destroy_process_group()

if __name__ == "__main__":
    layout = Layout.parse(sys.argv[2])
    arguments = layout.world, layout, int(sys.argv[3]), sys.argv[4]
    torch.multiprocessing.start_processes(train, arguments, layout.world, start_method="fork")
"""
ONE = 2
"""Programs: the first block's has a frozen weight and is another one."""
MORE = 6
"""With experts, which are not compiled: a block is what is before and what is after them."""


def run(layout: str, programs: int, backend: str) -> None:
    """In processes of their own: the compiler leaves threads behind."""
    command = [sys.executable, "-c", RUN, str(free_port()), layout, str(programs), backend]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("layout", "programs"), [
    ("tp=2,compile=blocks", ONE),
    ("cp=2,compile=blocks", ONE),
    ("cp=2,cp_kind=ulysses,recompute=full,compile=blocks,activations=bf16", ONE),
    ("tp=2,cp=2,compile=blocks,activations=fp8", ONE),
    ("fsdp=2,zero=1,compile=blocks", ONE),
    ("fsdp=2,ep=2,compile=blocks", MORE),
    ("pp=2,schedule=zb,micro_batch=4,compile=blocks", ONE),
    ("fsdp=2,pp=2,schedule=zb,micro_batch=4,compile=blocks", ONE),
])  # fmt: skip
def test_compiled_blocks_train_like_one_device(layout: str, programs: int) -> None:
    assert ",compile=blocks" in str(Layout.parse(layout))
    run(layout, programs, "aot_eager")


def test_with_kernels_of_the_compilers_own() -> None:
    run("tp=2,pp=2,schedule=zb,micro_batch=4,recompute=full,compile=blocks", ONE, "inductor")
