"""How many of the faults that TRL has mended the conformance suite sees: ``nox -s upstream_fixes``."""
