"""Many NCCL ranks on one GPU.

NCCL refuses two ranks on one GPU of one host, and takes them for ranks of several hosts where NCCL_HOSTID differs.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

QUICK = {
    "NCCL_ALGO": "Ring", "NCCL_MIN_NCHANNELS": "1", "NCCL_MAX_NCHANNELS": "1", "NCCL_MAX_P2P_NCHANNELS": "1",
    "NCCL_NTHREADS": "64", "NCCL_BUFFSIZE": "262144", "NCCL_SOCKET_NTHREADS": "1", "NCCL_NSOCKS_PERTHREAD": "1",
    "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0", "NCCL_RAS_ENABLE": "0",
}  # fmt: skip
"""Few and small connections: a layout makes a dozen communicators, and sends little through them."""
MPS_SECONDS = 60
QUIT_SECONDS = 15
"""MPS ends at once, or hardly ever: a minute was not enough on one machine."""


def as_host(name: int | str) -> dict[str, str]:
    """The variables of a rank that is to be on a host of its own."""
    return {"NCCL_HOSTID": f"host-{name}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", **QUICK}


@contextmanager
def shared_gpu(folder: Path) -> Iterator[bool]:
    """While processes share the GPU through MPS: whether they do."""
    control = shutil.which("nvidia-cuda-mps-control")
    pipes = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps")}
    if control is None:
        yield False
        return
    (folder / "mps").mkdir()
    environment = {**os.environ, **pipes}
    try:
        subprocess.run([control, "-d"], env=environment, check=True, timeout=MPS_SECONDS, capture_output=True)
        trying = [sys.executable, "-c", "import torch; torch.zeros(1, device='cuda')"]
        subprocess.run(trying, env=environment, check=True, timeout=MPS_SECONDS, capture_output=True)
        os.environ.update(pipes)
        yield True
    except subprocess.SubprocessError as error:
        print(f"note: no MPS, processes take turns on the GPU: {error}", flush=True)
        yield False
    finally:
        for name in pipes:
            os.environ.pop(name, None)
        _end(control, environment)


def _end(control: str, environment: Mapping[str, str]) -> None:
    """End the daemon: one that waits for its server, which waits for a client's last words, is killed."""
    try:
        subprocess.run(
            [control], input="quit -t 5\n", env=environment, text=True, timeout=QUIT_SECONDS, capture_output=True
        )
    except subprocess.TimeoutExpired:
        for path in Path(environment["CUDA_MPS_PIPE_DIRECTORY"]).glob("*.pid"):
            os.kill(int(path.read_text()), signal.SIGKILL)
