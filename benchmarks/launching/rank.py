"""A rank that a program such as torchrun has started: it trains, and leaves its losses in a folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from benchmarks.launching.training import train_here


def main(folder: str) -> None:
    losses = train_here()
    (Path(folder) / f"{os.environ['RANK']}.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1])
