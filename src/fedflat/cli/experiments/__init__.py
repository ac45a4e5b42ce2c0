"""Commands that run experiments and work with their results."""
