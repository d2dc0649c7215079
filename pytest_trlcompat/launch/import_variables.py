"""Which environment variables are read while a server imports the stack: a rank cannot change those afterwards.

``HF_HOME`` and ``TRANSFORMERS_VERBOSITY`` are two of them. A launch that gives one of them another value than the
server had gets a server of its own. No list names these variables, since the server records which ones are read.
Variables that compiled code reads by ``getenv`` are not seen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

__all__ = ["differing", "recorded"]

_OF_A_LAUNCH = (
    *("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "FSDP_"),
    *("TRLCOMPAT_", "PYTEST_", "TMPDIR", "PYTHONPATH"),
)
"""How variables begin that each launch has of its own, that say something of a test alone, or that ranks are given in
another way (their ``sys.path``)."""


@contextlib.contextmanager
def recorded() -> Iterator[set[str]]:
    """The names of the variables that are read by Python within the block, also of those that are not set."""
    names: set[str] = set()
    plain = type(os.environ)

    class Recording(plain):  # type: ignore[misc,valid-type]
        # Mapping's get() and `in` come to this method too, and so does os.getenv.
        def __getitem__(self, key: str) -> str:
            names.add(key)
            return str(super().__getitem__(key))

    # The class, and not another object in its place: modules have imported os.environ by its name.
    os.environ.__class__ = Recording
    try:
        yield names
    finally:
        os.environ.__class__ = plain


def differing(names: frozenset[str], had: Mapping[str, str], now: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """The variables to which a launch gives another value than a server had when it imported the stack.

    Args:
        names: of the variables that were read then.
        had: the server's; ``now``: the launch's.

    Returns:
        Names and values; an empty value too where the launch does not have the variable.
    """
    return frozenset(
        (name, now.get(name, ""))
        for name in names
        if had.get(name) != now.get(name) and not name.startswith(_OF_A_LAUNCH)
    )
