"""``python -m pytest_trlcompat.bisect releases ...``: what ``trlcompat bisect`` and ``nox -s bisect`` run."""

from __future__ import annotations

import sys

from pytest_trlcompat.bisect.cli import main

sys.exit(main())
