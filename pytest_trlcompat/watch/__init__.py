"""Watches the package index for releases that the matrix does not know, and measures them: ``nox -s watch``.

A bisection is started as a program.
"""
