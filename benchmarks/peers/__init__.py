"""Other training libraries on the same tasks, each in an environment of its own.

`make bench-peers` makes the environments; `keras.txt`, `orbit.txt` and `lightning.txt`
list what is in them. A peer gets every advantage that its plain interface offers: the
batches are cut before it starts, so that its input pipeline only chooses their order,
and of two ways that its documentation shows the faster one is taken.
"""
