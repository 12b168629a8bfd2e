"""State of a user's objects, lifted in and out of traced functions.

The idea in one paragraph: a *slot* is a place that holds an array. `State` finds every
slot that a trainer reaches, swaps tracers in, lets the user's method run, collects the
new values, and puts the old ones back. One walk (`_walk`) finds the slots, and all that
a step could read as a constant; `_holders`, `_functions`, `_nnx` and `_keras` know what
can hold what. Two walks are compared (`_compare`) to tell whether a trace is still
good, and one can be undone, so that a step that fails leaves nothing behind.
"""

__all__: list[str] = []
