"""A sampler and a reward for rlx that both remember what was tried before."""
