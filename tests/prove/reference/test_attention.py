from __future__ import annotations

from phalanx.prove.proof import prove
from phalanx.recipes.gpt import GPT


def test_parts_of_sequences_train_as_one_device_says_they_do() -> None:
    layouts = ["cp=2,activations=bf16", "cp=2,cp_kind=ulysses,activations=fp8"]
    proof = prove(GPT(layers=2, heads=2, kv_heads=1, dropout=0.1), layouts, check=False)
    assert proof.holds, str(proof)
