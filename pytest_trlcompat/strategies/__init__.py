"""Families of strategies, each a module of this package: names, needs, defaults, environment, engine, proof.

Nothing lists them: :data:`NAMES` is collected from the classes. What a launch does with one is in
:mod:`pytest_trlcompat.launch`.
"""

from __future__ import annotations

import importlib
import os

from pytest_trlcompat.strategies.dimensions import DIMENSIONS, parts_of, without_variant
from pytest_trlcompat.strategies.family import Family, Need, StrategyAbsent, StrategyError, families, family_of

__all__ = [
    "DIMENSIONS",
    "DISTINCT",
    "NAMES",
    "Family",
    "Need",
    "StrategyAbsent",
    "StrategyError",
    "families",
    "family_of",
    "parts_of",
    "without_variant",
]

_TABLES = "config_keys.py"
"""The one module that is imported when it is needed: every start of pytest and of the doctor imports the others."""

for _file in sorted(os.listdir(os.path.dirname(__file__))):
    if _file.endswith(".py") and _file not in ("__init__.py", _TABLES):
        importlib.import_module(f"{__name__}.{_file.removesuffix('.py')}")

NAMES: tuple[str, ...] = tuple(name for family in families() for name in family.names)
"""The strategies that can be launched."""

DISTINCT: tuple[str, ...] = tuple(name for family in families() for name in family.names if name not in family.alike)
"""Those of :data:`NAMES` that train in a way of their own, for measurements that take too long for all."""
