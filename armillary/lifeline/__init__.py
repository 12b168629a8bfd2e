"""Ends a job whose processes wait for one that is dead or stuck, and says which.

A process in a collective operation waits for ever for one that is gone. So a thread in
each holds a connection to process 0, over which they tell each other, every second,
what they do. Whoever learns of one that is gone, or that none goes on, prints it, lets
the main thread and a save end, and ends with `ExitCode.RESTART_REQUESTED`.

JAX's coordination service takes 8 s for that, counts a stopped process as dead, and
aborts in C++ without a name or an exit code of ours (measured with JAX 0.10.2).
"""
