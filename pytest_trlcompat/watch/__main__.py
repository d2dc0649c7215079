"""``python -m pytest_trlcompat.watch``, which ``nox -s watch`` runs in an environment of its own."""

from __future__ import annotations

import sys

from pytest_trlcompat.watch.cli import main

if __name__ == "__main__":
    sys.exit(main())
