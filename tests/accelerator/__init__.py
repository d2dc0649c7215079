"""Tests of the software accelerator, without torch."""
