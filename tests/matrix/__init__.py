"""Tests of the matrix: a cell as a job, its sweep, the report. They share a made-up cell."""
