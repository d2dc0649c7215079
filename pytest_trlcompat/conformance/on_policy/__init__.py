"""What the rooms of PPO and of the first RLOO share: what is kept of a training, and how it becomes the reference's."""
