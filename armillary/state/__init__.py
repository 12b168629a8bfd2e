"""State of a user's objects, lifted in and out of traced functions.

The idea in one paragraph: a *slot* is a place that holds an array. `State` finds every
slot that a trainer reaches, swaps tracers in, lets the user's method run, collects the
new values, and puts the old arrays back. One walk (`_walk`) finds the slots, and all
values that a step could read as constants. `_holders`, `_nnx` and `_keras` define which
objects can hold others. If two walks differ, a trace may be outdated.
"""
