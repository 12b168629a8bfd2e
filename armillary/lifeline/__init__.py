"""Ends a job whose processes wait for one that is dead or stuck, and says which.

A process in a collective operation waits for ever for one that is gone. So a thread in
each process holds a connection to process 0, over which they tell each other, every
second, what they do. The kernel closes the connection of a process that ends, however
that happens, and notices when a machine no longer answers. A process that only works
hard in C code, or compiles for an hour, keeps its connection. One that is *stuck* is
found by `hang_timeout_seconds`: no process has gone on for that long.

Whoever learns of it prints it, lets the main thread and a save come to an end for a few
seconds, and ends the process with `ExitCode.RESTART_REQUESTED`.

JAX's coordination service cannot do this. Measured with JAX 0.10.2 and
`heartbeat_timeout_seconds=10`: it notices a dead worker after 8 s, while the error of a
broken collective operation ends the others after 0.5 s, without a name. It then aborts
them in C++ with SIGABRT, not with an exit code of ours; if process 0 dies, after 0.2 s
and without a name, recoverable tasks included. A `missed_heartbeat_callback` in Python
aborts as well. And a process that is only stopped for 10 s would count as dead.
"""

__all__: list[str] = []
