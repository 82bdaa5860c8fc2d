"""HTTP endpoints through which a program of any kind acts as the agent of an episode.

`server` owns the address and the tokens, `session` one episode's part of it, `chat`, `completions`
and `anthropic` the three ways in which a program may ask.
"""
