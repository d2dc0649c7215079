"""Says which limit of the system was reached, from the error with which it refused something.

Imports only the standard library: the test process, the server and the keepers need it.
"""

from __future__ import annotations

import errno
import resource

__all__ = ["explain"]


def explain(error: OSError) -> str:
    """``OSError: [Errno 24] Too many open files: this process may have 20 (`ulimit -n`)``."""
    text = f"{type(error).__name__}: {error}"
    hint = _hint(error.errno)
    return text if hint is None else f"{text}: {hint}"


def _hint(number: int | None) -> str | None:
    if number == errno.EMFILE:
        return f"this process may have {_limit(resource.RLIMIT_NOFILE)} (`ulimit -n`)"
    # fork(2) answers so for either limit, and does not say which of them was reached.
    if number == errno.EAGAIN:
        processes = _limit(resource.RLIMIT_NPROC)
        return f"no more processes: the user may have {processes} (`ulimit -u`), and the control group has a limit too"
    if number == errno.ENOMEM:
        return "no more memory for another process"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "no space, or no more files, in the folder for temporary files (`TMPDIR`)"
    return None


def _limit(what: int) -> str:
    soft, _ = resource.getrlimit(what)
    return "any number" if soft == resource.RLIM_INFINITY else str(soft)
