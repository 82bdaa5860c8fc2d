"""The conformance kit as a pytest plugin: fixtures around `rlx.testing`."""
