"""Examples do what they say, at any number of ranks."""

from __future__ import annotations

import pytest
from examples.callbacks import Rings
from examples.detector import Detector
from examples.gan import GAN
from examples.matrices import Matrices

import phalanx
from phalanx import Layout
from phalanx.prove.proof import prove
from tests.ranks import Ranks


def detected(layout: str) -> dict[str, float]:
    task = Detector(steps=60, precision="float64")
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        for batch in engine.batches():
            engine.step(batch)
        return engine.evaluate()


def test_auc_and_f1_are_the_same_at_1_2_and_4_ranks(ranks: Ranks) -> None:
    one = detected("dp=1")
    assert one["auc"] > 0.8
    assert 0 < one["f1"] < 1
    for layout in ("dp=2", "fsdp=4", "dp=2,pp=2,micro_batch=7"):
        for found in ranks(Layout.parse(layout).world, detected, layout):
            assert (found["auc"], found["f1"]) == (one["auc"], one["f1"])
            assert found["loss"] == pytest.approx(one["loss"], rel=1e-9)


def test_rings_with_callbacks_are_proven() -> None:
    proof = prove(Rings(), ["dp=2", "fsdp=2"])
    assert proof.holds, proof


def test_the_detector_is_proven() -> None:
    proof = prove(Detector(), ["dp=4", "fsdp=2,zero=1", "dp=2,pp=2"])
    assert proof.holds, proof


@pytest.mark.every
def test_the_detector_is_proven_under_all_layouts() -> None:
    proof = prove(Detector(), "all", ranks=4)
    assert proof.holds, proof


def drawn(layout: str) -> tuple[dict[str, float], float]:
    task = GAN(steps=40, width=16, precision="float64")
    with phalanx.Engine(task, Layout.parse(layout), device="cpu") as engine:
        loss = [engine.step(batch).loss for batch in engine.batches()][-1]
        return engine.evaluate(), loss


def test_a_gan_is_the_same_at_1_2_and_4_ranks(ranks: Ranks) -> None:
    one, loss = drawn("dp=1")
    for layout in ("dp=2", "fsdp=4", "dp=2,fsdp=2,micro_batch=5"):
        for found, last in ranks(Layout.parse(layout).world, drawn, layout):
            assert found == pytest.approx(one, rel=1e-9)
            assert last == pytest.approx(loss, rel=1e-9)


def test_the_gan_is_proven() -> None:
    proof = prove(GAN(), ["dp=4", "fsdp=2", "fsdp=2,zero=1"])
    assert proof.holds, proof


@pytest.mark.every
def test_the_gan_is_proven_under_all_layouts() -> None:
    proof = prove(GAN(), "all", ranks=4)
    assert proof.holds, proof


@pytest.mark.every
def test_whole_matrices_are_proven() -> None:
    proof = prove(Matrices(), ["fsdp=2", "fsdp=2,tp=2"])
    assert proof.holds, proof
