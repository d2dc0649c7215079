"""Tests of the doctor. A package, so that they can share a made-up catalogue."""
