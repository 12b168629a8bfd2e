"""Measures Armillary against hand-written loops and against other libraries.

`python -m benchmarks` measures a matrix of cases and prints a table; `--help` lists
what can be chosen. Every *contestant* (a hand-written reference, Armillary, a peer)
runs in a worker process of its own and all of them take turns, so that a slow moment
of the machine meets everybody. The modules that are commands of their own, such as
`benchmarks.host_work`, measure one further thing each.
"""
