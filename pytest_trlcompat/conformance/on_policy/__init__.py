"""What PPO and the legacy RLOO share: the records of a training, and how they become inputs of the reference."""
