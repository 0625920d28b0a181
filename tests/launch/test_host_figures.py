"""Figures of a host: read from this one, told as what was added, in a file that does not grow for ever."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from phalanx.launch import host_figures
from phalanx.launch.host_figures import HostFigures, HostLog, figures_path, gpus
from phalanx.run import Run


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="/proc is Linux's")
def test_this_host_is_looked_at() -> None:
    figures = HostFigures()
    began = time.monotonic()
    while time.monotonic() - began < 0.15:  # busy
        pass
    found = figures.look()
    figures.close()
    assert 0 < float(found["cpu"]) <= 100
    assert 0 < float(found["memory_used"]) < float(found["memory_total"])
    assert float(found["disk_written"]) >= 0
    assert 0.1 < float(found["seconds"]) < 60


def test_lines_are_written_no_more_often_and_the_file_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path)
    log = HostLog(run, 8, 4)
    log.write()
    assert not figures_path(run, 8).exists()
    monkeypatch.setattr(host_figures, "MOST_BYTES", 4000)
    for _ in range(60):
        log.write(least=0.0)
    assert figures_path(run, 8).name == "host-00008.jsonl"
    assert figures_path(run, 8).stat().st_size <= 4500
    lines = [json.loads(line) for line in figures_path(run, 8).read_text().splitlines()]
    assert all(line["kind"] == "host" and line["first"] == 8 and line["ranks"] == 4 for line in lines)


def test_gpus_as_their_driver_tells() -> None:
    said = "0, 1980, 612.41, 61, 0x0000000000000000\n1, 1290, 350.02, 87, 0x0000000000000024\n2, [N/A], 60, 30, 0x1\n"
    found = gpus(said)
    assert (found["gpu0_clock"], found["gpu0_power"], found["gpu0_temperature"]) == (1980.0, 612.41, 61.0)
    assert "gpu0_throttled" not in found
    assert found["gpu1_throttled"] == "power cap, heat"
    assert "gpu2_clock" not in found
    assert "gpu2_throttled" not in found
    assert gpus("No devices were found\n") == {}


def test_the_driver_is_asked_and_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers is heard at the next look; one that does not is ended with the figures."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec cat answer\n")
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    Path("answer").write_text("0, 1980, 612.41, 61, 0x0000000000000024\n")
    figures = HostFigures()
    assert "gpu0_clock" not in figures.look()
    until = time.monotonic() + 20
    while "gpu0_clock" not in (found := figures.look()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert found["gpu0_throttled"] == "power cap, heat"
    figures.close()
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    silent = HostFigures()
    silent.look()
    began = time.monotonic()
    assert "gpu0_clock" not in silent.look()
    silent.close()
    assert time.monotonic() - began < 30
