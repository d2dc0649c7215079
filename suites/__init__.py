"""Test modules by topic, with a test for each known issue, run for TRL's own trainer and for the corrected one."""
