"""What the suites launch: runs inside the ranks, and imports the stack only inside functions."""
