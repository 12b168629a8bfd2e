"""Other training libraries on the same tasks, each in an environment of its own.

`make bench-peers` makes the environments; a list such as `keras.txt` has the packages
of each. A peer gets every advantage that its plain interface offers: the
batches are cut before it starts, so that its input pipeline only chooses their order,
and of two ways that its documentation shows the faster one is taken.
"""
