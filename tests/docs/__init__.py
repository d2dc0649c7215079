"""Tests of what README and the tutorials show."""
