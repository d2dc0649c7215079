"""``python -m pytest_trlcompat``: the same as ``trlcompat``."""

from __future__ import annotations

import sys

from pytest_trlcompat.cli import main

if __name__ == "__main__":
    sys.exit(main())
