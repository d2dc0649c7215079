"""Suites that hold trainers against the reference, see :mod:`pytest_trlcompat.conformance`."""
