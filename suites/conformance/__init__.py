"""Suites that compare trainers with the reference, see :mod:`pytest_trlcompat.conformance`."""
