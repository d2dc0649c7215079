"""Cures of TRL's PPO trainer; some are for the RLOO trainer of TRL 0.21 and before, whose training loop is PPO's."""
