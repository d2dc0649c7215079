"""What PPO and the legacy RLOO share: what is recorded of a training, and how it becomes the reference's."""
