"""Tests of bisection end to end. A package, so that they can share a made-up registry.

Not called ``bisect``: pytest puts the folder above it on the path, where it would hide Python's own module.
"""
