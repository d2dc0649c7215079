"""Watches the package index for releases that the matrix does not know, and measures them: ``nox -s watch``.

Imports the matrix and what is below it, and starts a bisection as a program. Never imports the stack.
"""
