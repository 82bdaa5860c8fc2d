"""Training an objective on fixed data: preparation, the loop, the reference's log-probs."""
