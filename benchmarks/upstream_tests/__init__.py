"""TRL's own tests of GRPO and PPO, as they are and with the corrected trainers: ``nox -s upstream_tests``."""
