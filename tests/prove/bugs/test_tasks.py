"""Tasks of known bugs are right where none is planted, and make what they are for happen."""

from __future__ import annotations

from phalanx.prove.bugs.tasks import Overlap
from phalanx.prove.proof import prove
from phalanx.prove.reference.hostile import Trial, hostile
from phalanx.prove.reference.loop import Reference


def test_an_overlap_of_all_samples_trains_like_one_device() -> None:
    proof = prove(Overlap(), ["dp=2", "fsdp=2"])
    assert proof.holds, proof
    reference = Reference(hostile(Overlap(), Trial(1))).run(1)
    assert reference.gathers
    assert reference.couples_samples
