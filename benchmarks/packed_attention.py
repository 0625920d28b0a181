"""Attention inside packed documents: every way there is beside the dense mask, time and error, forward and backward.

    python benchmarks/packed_attention.py [--rows N] [--length N] [--heads N] [--kv-heads N] [--width N] [--shortest N]
        [--longest N] [--only WAY ...] [--repeats N] [--quick]

Documents of random lengths fill every row. Times are of events on the GPU, medians of runs in a row, all ways in turns;
errors are relative to a dense mask in float32, of values and of all gradients. Ways whose package is not here, or which
fail, are said and left out. ``whole``: rows that are one document each, causal, as SDPA computes them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from phalanx.kernels import flash_attention
from phalanx.kernels.documents import dense_mask, starts_of
from phalanx.kernels.packed_attention import laid_end_to_end
from report import Figure, report

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Rows of documents, and what attention is given."""

    given: list[Tensor]
    grad: Tensor
    starts: Tensor

    @property
    def length(self) -> int:
        return self.given[0].shape[2]


def made(options: argparse.Namespace, device: torch.device) -> Case:
    draw = torch.Generator().manual_seed(0)
    ids = torch.empty(options.rows, options.length, dtype=torch.long)
    for row in ids:
        place = number = 0
        while place < options.length:
            size = int(torch.randint(options.shortest, options.longest + 1, (1,), generator=draw))
            row[place : place + size] = number
            place, number = place + size, number + 1
    starts = starts_of(ids)
    assert starts is not None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (options.heads, options.kv_heads, options.kv_heads, options.heads)
    q, k, v, grad = (
        torch.randn(options.rows, options.length, each, options.width, generator=draw).to(device, dtype).transpose(1, 2)
        for each in heads
    )
    return Case([x.requires_grad_() for x in (q, k, v)], grad, starts.to(device))


def dense(case: Case) -> Attend:
    """As it was: one mask for all layers."""
    mask = dense_mask(case.starts, 0, case.length, case.length, causal=True)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def repeated(case: Case) -> Attend:
    """A dense mask with keys repeated for all heads, as transformers has it."""
    mask = dense_mask(case.starts, 0, case.length, case.length, causal=True)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return attend


def varlen(case: Case, flash_below: bool = False) -> Attend:
    """torch's own, with nothing below it."""
    from phalanx.kernels.varlen import varlen

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flash_attention.packed_flash_attention.settle(q.device, flash_below)
        return laid_end_to_end(varlen, q, k, v, case.starts, True, None, 0)

    return attend


def flash(case: Case) -> Attend:
    """FlashAttention 4, by its own function."""
    return lambda q, k, v: laid_end_to_end(flash_attention.varlen, q, k, v, case.starts, True, None, 0)


def flash_below(case: Case) -> Attend:
    """torch's own with FlashAttention 4 in the dispatcher, as runs have it."""
    device = case.starts.device
    flash_attention.stand_in(device)
    if not flash_attention.packed_flash_attention.works(device):
        raise RuntimeError("the package does not work here")
    return varlen(case, flash_below=True)


def flex(case: Case) -> Attend:
    """flex_attention, compiled; its mask of blocks is made once for all layers."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    places = torch.arange(case.length, device=case.starts.device)
    documents = (case.starts.flatten(1).unsqueeze(-1) <= places).sum(1)

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (documents[b, i] == documents[b, j])

    blocks = torch.compile(create_block_mask)(
        seen, len(documents), None, case.length, case.length, device=case.starts.device
    )
    return partial(torch.compile(flex_attention), block_mask=blocks, enable_gqa=True)


def whole(case: Case) -> Attend:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


WAYS = {
    "dense": dense, "dense, keys repeated": repeated, "flex": flex, "whole": whole, "FlashAttention 4": flash,
    "varlen_attn with FlashAttention 4 below": flash_below, "varlen_attn": varlen,
}  # fmt: skip


def with_gradients(attend: Attend, given: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = attend(*given)
    return [out.detach(), *torch.autograd.grad(out, given, grad)]


def expected(case: Case) -> list[Tensor]:
    """In float32, a row at a time."""
    rows = []
    with sdpa_kernel(SDPBackend.MATH):
        for row in range(len(case.grad)):
            one = Case([x.detach()[row : row + 1].float().requires_grad_() for x in case.given],
                       case.grad[row : row + 1].float(), case.starts[row : row + 1])  # fmt: skip
            rows.append(with_gradients(dense(one), one.given, one.grad))
    return [torch.cat(each) for each in zip(*rows, strict=True)]


def milliseconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    if device.type != "cuda":
        began = time.process_time()
        for _ in range(times):
            run()
        return 1e3 * (time.process_time() - began) / times
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()  # type: ignore[no-untyped-call]
    for _ in range(times):
        run()
    end.record()  # type: ignore[no-untyped-call]
    end.synchronize()
    return begin.elapsed_time(end) / times


def compared(options: argparse.Namespace, device: torch.device) -> list[Figure]:
    case = made(options, device)
    right = expected(case)
    counts = (case.starts.flatten(1) < case.length).sum(1).tolist()
    print(f"{options.rows} x {options.length}, documents a row: {', '.join(map(str, counts))}")
    ways: dict[str, Callable[[], object]] = {}
    errors: dict[str, str] = {}
    for name, make in WAYS.items():
        if options.only and name not in options.only:
            continue
        try:
            attend = make(case)
            found = with_gradients(attend, case.given, case.grad)
        except Exception as error:  # it is said, and the others are measured
            print(f"{name}: left out, {type(error).__name__}: {str(error).splitlines()[0][:200]}")
            continue
        off = [float((a.float() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)]
        errors[name] = "other masks" if name == "whole" else "error " + ", ".join(f"{each:.1e}" for each in off)
        ways[name] = partial(with_gradients, attend, case.given, case.grad)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, run in ways.items():
            milliseconds(run, device, 2)
            times[name].append(milliseconds(run, device, 2 if options.quick else 20))
    return [Figure(f"{name}, ms", statistics.median(each), None, errors[name]) for name, each in times.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 4), ("length", 4096), ("heads", 32), ("kv-heads", 8), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--shortest", type=int, default=300)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=list(WAYS))
    parser.add_argument("--quick", action="store_true", help="small rows, for a processor")
    options = parser.parse_args()
    if options.quick:
        vars(options).update(rows=2, length=256, heads=4, kv_heads=2, shortest=20, longest=90, repeats=1)
    report(compared(options, torch.device("cuda" if torch.cuda.is_available() else "cpu")))


if __name__ == "__main__":
    main()
