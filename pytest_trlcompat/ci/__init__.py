"""Continuous integration of projects that use this one: what ``trlcompat init-ci`` writes for them."""
