"""The learner: packed micro-batches, log-probs on action positions, DeepSpeed training, weights."""
