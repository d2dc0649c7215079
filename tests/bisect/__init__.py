"""Tests of bisection. Those from end to end share a made-up registry."""
