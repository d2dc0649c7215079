"""Makes the report: ``python -m pytest_trlcompat.matrix build/compat [--sweep NAME]``.

Runs in an environment with ``rich`` and ``jinja2``, unlike the rest of this package.
"""

from __future__ import annotations

import sys

from pytest_trlcompat.matrix.report.command import main

sys.exit(main())
