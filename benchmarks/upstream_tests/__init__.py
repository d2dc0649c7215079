"""TRL's own tests of its GRPO and PPO trainers, as they are and with the corrected trainers: ``nox -s upstream_tests``."""
