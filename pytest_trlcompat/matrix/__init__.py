"""The version matrix: cells, their locks and environments, the sweep over them, and its report.

Runs outside the environments, in the interpreter of nox.
"""
