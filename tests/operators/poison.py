"""What freshly allocated memory holds, so that who reads it without having written to it is found out each time."""

from __future__ import annotations

import ctypes

__all__ = ["fill_new_memory"]

_M_PERTURB = -6  # of glibc's malloc.h


def fill_new_memory(byte: int) -> None:
    """Let the C library fill memory with ``byte`` before it hands it out; not 255, which it takes for "not at all"."""
    if ctypes.CDLL(None).mallopt(_M_PERTURB, byte ^ 0xFF) != 1:
        raise OSError("the C library cannot fill the memory that it allocates; a Linux with glibc can")
