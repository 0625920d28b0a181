"""Who is measured: the same shape, tokens, AdamW and clipping, each as its own users would train it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import phalanx
from phalanx.bench.shape import CHOSEN, HEAD, Llama, Shape, hugging_face, transformer
from phalanx.bench.stand_ins import StandIns
from phalanx.task import Precision

Step = Callable[[], Any]
RATE = 3e-4


@dataclass(frozen=True)
class Setting:
    """What all contenders have alike."""

    shape: Shape
    device: str
    precision: Precision
    offload: int = 0
    """Percent of the state that are on the host, or all where a contender knows nothing else; with them activations
    are computed again."""

    def batch(self) -> tuple[Tensor, Tensor]:
        size = self.shape.batch, self.shape.length + 1
        tokens = torch.randint(0, self.shape.vocabulary, size, device=self.device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def autocast(self) -> AbstractContextManager[Any]:
        """In bf16 where anything narrower than float32 is asked for: peers train no narrower here."""
        return nullcontext() if self.precision == "fp32" else torch.autocast(self.device, torch.bfloat16)


def ours(setting: Setting, own: bool) -> Iterator[Step]:
    task = Llama(
        shape=setting.shape, hugging_face=not own, global_batch=setting.shape.batch, precision=setting.precision,
        learning_rate=RATE,
    )  # fmt: skip
    layout = "dp=1,compile=blocks" if setting.device == "cuda" else "dp=1"
    if setting.offload:
        layout += f",recompute=full,offload=optimizer,offload_percent={setting.offload}"
    with phalanx.Engine(task, layout, device=setting.device) as engine:
        batches = engine.batches()
        yield lambda: engine.step(next(batches))


def plain(setting: Setting) -> Iterator[Step]:
    """Our model in a loop of a few lines, as torch gives it: not compiled, all logits at once."""
    model = transformer(setting.shape).to(setting.device)
    yield _loop(setting, model, lambda tokens: model(tokens).tensor(), _cross_entropy)


def torchtitan(setting: Setting) -> Iterator[Step]:
    """Its model, every block compiled, its loss compiled, fused AdamW."""
    StandIns.install()
    with torch.device("meta"):
        model = _titan_with_experts(setting.shape) if setting.shape.experts else _titan(setting.shape)
    model.to_empty(device=setting.device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(setting.device))
    if setting.device == "cuda" and setting.shape.experts:
        from torchtitan.config.job_config import Compile
        from torchtitan.models.llama4.infra.parallelize import apply_compile

        apply_compile(model, Compile(enable=True), ep_enabled=False)
    elif setting.device == "cuda":
        for name, block in model.layers.named_children():
            model.layers.register_module(name, torch.compile(block, fullgraph=True))
    loss_of = torch.compile(_cross_entropy) if setting.device == "cuda" else _cross_entropy
    yield _loop(setting, model, model, loss_of)


def _titan(shape: Shape) -> Any:
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer as Titan

    return Titan(TransformerModelArgs(
        dim=shape.width, n_layers=shape.layers, n_heads=shape.heads, n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocabulary, ffn_dim_multiplier=1.5, multiple_of=min(1024, 4 * shape.width),
        rope_theta=500_000, max_seq_len=shape.length,
    ))  # fmt: skip


def _titan_with_experts(shape: Shape) -> Any:
    """Qwen's, which without norms of queries and keys, and shares that add up to one, is Mixtral's."""
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3.model.args import Qwen3ModelArgs
    from torchtitan.models.qwen3.model.model import Qwen3Model

    experts = MoEArgs(
        num_experts=shape.experts, num_shared_experts=0, top_k=CHOSEN, score_func="softmax", route_norm=True,
        score_before_experts=False, use_grouped_mm=torch.cuda.is_available(),
    )  # fmt: skip
    return Qwen3Model(Qwen3ModelArgs(
        dim=shape.width, n_layers=shape.layers, n_heads=shape.heads, n_kv_heads=shape.kv_heads,
        vocab_size=shape.vocabulary, head_dim=HEAD, qk_norm=False, rope_theta=500_000, max_seq_len=shape.length,
        moe_enabled=True, moe_inter_dim=4 * shape.width, moe_args=experts,
    ))  # fmt: skip


def _cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def _loop(setting: Setting, model: nn.Module, call: Callable[[Tensor], Tensor], loss_of: Callable[..., Tensor]) -> Step:
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, RATE, fused=True)

    def step() -> Tensor:
        tokens, targets = setting.batch()
        with setting.autocast():
            loss = loss_of(call(tokens), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def accelerate(setting: Setting) -> Iterator[Step]:
    """With transformers, not compiled."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="no" if setting.precision == "fp32" else "bf16", cpu=setting.device == "cpu",
        fsdp_plugin=_sharding(setting) if setting.offload else None,
    )  # fmt: skip
    with torch.device(setting.device):
        model = hugging_face(setting.shape)
    if setting.offload:
        model.cpu()
    weights = list(model.parameters())
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(weights, RATE, fused=True))
    weights = list(model.parameters())

    def step() -> Tensor:
        tokens, _ = setting.batch()
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    yield step


def _sharding(setting: Setting) -> Any:
    """Accelerate's offload: torch's fully_shard among one rank, which keeps everything on the host."""
    from accelerate import FullyShardedDataParallelPlugin

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true", "FSDP_VERSION": "2",
    }  # fmt: skip
    block = "MixtralDecoderLayer" if setting.shape.experts else "LlamaDecoderLayer"
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_offload=True, auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[block], activation_checkpointing=True,
    )  # fmt: skip


@dataclass(frozen=True)
class Contender:
    """One of them."""

    title: str
    steps: Callable[[Setting], Iterator[Step]]
    needs: tuple[str, ...] = ()
    """Packages."""
    offloads: bool = False
    """Whether it can keep state on the host."""


CONTENDERS = {
    "phalanx": Contender("Phalanx, its own transformer", lambda setting: ours(setting, own=True), offloads=True),
    "phalanx-hf": Contender(
        "Phalanx with a Hugging Face model", lambda setting: ours(setting, own=False), ("transformers",), offloads=True
    ),
    "torch": Contender("a plain loop in torch", plain),
    "torchtitan": Contender("torchtitan, compiled block by block", torchtitan, ("torchtitan",)),
    "accelerate": Contender("Accelerate with transformers", accelerate, ("accelerate", "transformers"), offloads=True),
}
