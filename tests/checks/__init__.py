"""Tests of the checks, without the stack."""
