"""The way of weights from a learner to the rollout engines: buckets over shared memory or TCP."""
