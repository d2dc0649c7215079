"""Known issues of PPO."""
