"""What each parallelism sends, holds and waits for, against arithmetic.

python benchmarks/parallel.py [--quick] [--only traffic|memory|bubble]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import bubble
import share
import traffic
from report import report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a rough answer in under a minute")
    parts = {"traffic": traffic.figures, "memory": share.figures, "bubble": bubble.figures}
    parser.add_argument("--only", choices=list(parts))
    options = parser.parse_args()
    report([f for name, part in parts.items() if options.only in (None, name) for f in part(options.quick)])


if __name__ == "__main__":
    main()
