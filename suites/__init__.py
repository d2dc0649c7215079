"""Test modules by topic, with a test for each known issue, run for TRL's own trainer and for the corrected one.

They run in the test process, which imports nothing of the stack; :mod:`suites.in_rank` has what runs inside the ranks.
"""
