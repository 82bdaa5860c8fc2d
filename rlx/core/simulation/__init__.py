"""A discrete-event model of a run: engines, rewards and learner in virtual time.

`timings.Timings` says how long things take, `calibration` gets that from a recorded run, and
`run.simulate` plays the trainer's loop with any numbers of engines and ranks.
"""
