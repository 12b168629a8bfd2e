"""State of a user's objects, lifted in and out of traced functions.

The idea in one paragraph: a *slot* is a place that holds an array. `State` finds every
slot that a trainer reaches, swaps tracers in, lets the user's method run, collects the
new values, and puts the old arrays back. One walk (`_walk`) finds the slots, and all
values that a step could read as constants. `_holders` defines which objects can hold
others. An adapter (`_adapters`) answers questions about the objects of one library of
variables, such as Flax NNX. If two walks differ, a trace may be outdated.
"""
