"""Streaming from S3, spoken to as it is, by several workers of a loader."""

from __future__ import annotations

from pathlib import Path

import fsspec
import torch

from phalanx import Task
from phalanx.data import PackedFiles, StreamedFiles, StreamedSamples, TokenFiles
from phalanx.data.loader import Loader
from tests.checkpoint.test_commits import s3, server  # noqa: F401
from tests.data.test_streaming import copy, folder, small_blocks  # noqa: F401


def test_s3_is_read_by_workers_of_the_loader(folder: Path, s3: str, tmp_path: Path) -> None:  # noqa: F811
    copy(folder, fsspec.filesystem("s3"), s3.removeprefix("s3://"))
    here = PackedFiles(TokenFiles(folder), 16)
    samples = StreamedSamples(StreamedFiles(s3, tmp_path / "cache", "bytes", cache_bytes=1 << 20), 16)
    order = samples.training_order(8, 0)
    loader = Loader(samples, Task().collate, order, micro_batches=1, ranks=1, rank=0, workers=2)
    for batch in loader.batches(0, 6):
        want = [here[int(index)]["tokens"] for index in order.ids(batch.step)]
        assert torch.equal(batch.micro_batches[0].tensors["tokens"], torch.stack(want))
