"""Programs with triton in a process of their own: it looks at its variables when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def runs(program: str, **variables: str) -> None:
    """A program of tests runs to its end, with these variables set."""
    pytest.importorskip("triton", reason="triton is not installed (the dev extra has it)")
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; print('to its end')"], env=os.environ | variables, capture_output=True,
        text=True, check=False, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.stdout.strip() == "to its end", done.stderr
