"""Tests of launches, without the stack."""
