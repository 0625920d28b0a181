"""An error told: the user's own lines first, ours and torch's folded, and what a module got."""

from __future__ import annotations

import sysconfig
from pathlib import Path

OWN = Path(__file__).parent
USERS = (OWN / "models", OWN / "recipes")
"""Of ours, what is written as users write theirs."""
INSTALLED = ("site-packages", "dist-packages")


def users(file: str) -> bool:
    """Whether a file is the user's own: neither ours, nor installed, nor Python's."""
    path = Path(file)
    if file.startswith("<"):
        return file.startswith(("<ipython", "<stdin", "<string"))  # a notebook's cell, a program that is no file
    if any(part in INSTALLED for part in path.parts):
        return False
    if any(path.is_relative_to(folder) for folder in USERS):
        return True
    return not (path.is_relative_to(OWN) or path.is_relative_to(sysconfig.get_paths()["stdlib"]))
