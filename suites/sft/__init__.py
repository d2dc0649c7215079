"""Known issues of SFT that its trainings do not show on a CPU."""
