"""Ends a job whose processes wait for one that is dead or stuck, and says which.

A process in a collective operation waits for ever for one that is gone. So a thread in
each process holds a connection to process 0, over which they tell each other, every
second, what they do. The kernel closes the connection of a process that ends, and
notices when a machine no longer answers; one that works hard in C code keeps it. A
process that is *stuck* is found by `hang_timeout_seconds`. Whoever learns of it prints
it, lets the main thread and a save end, and ends with `ExitCode.RESTART_REQUESTED`.

JAX's coordination service cannot do this. Measured with JAX 0.10.2 and
`heartbeat_timeout_seconds=10`: it notices a dead worker after 8 s, and aborts in C++,
without a name and an exit code of ours; if process 0 dies, after 0.2 s. A process that
is only stopped for 10 s would count as dead.
"""

__all__: list[str] = []
