"""Tests that need the stack: they run in the environment of a cell."""
