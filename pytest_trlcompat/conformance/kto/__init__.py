"""What is KTO's own in the conformance suite: completions with labels, how they are read, and what documentation leaves
open."""
