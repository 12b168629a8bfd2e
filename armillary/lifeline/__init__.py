"""Ends a job whose processes wait for one that is dead or stuck, and says which.

A process in a collective operation waits forever for a process that is gone. So each
process has a thread with a connection to process 0. Over these connections, the
processes report every second what they do. When a process is gone, or no process makes
progress, the others print this. Then they let the main thread and a save end, and exit
with `ExitCode.RESTART_REQUESTED`.

JAX's coordination service takes 8 s for that, counts a stopped process as dead, and
aborts in C++ without a name or an exit code of ours (measured with JAX 0.10.2).
"""
