"""What a training is, in one vocabulary for all releases; imports the standard library alone."""
