"""Tests of a cell as a job and of its sweep. A package, so that they can share a made-up cell."""
