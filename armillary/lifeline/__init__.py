"""Ends a job whose processes wait for a dead or stuck process, and names that process.

A process in a collective operation waits forever for a process that is gone. So each
process has a thread with a connection to process 0. Over these connections, the
processes report every second what they do. When a process is gone, or no process makes
progress, the others print this. Then they let the main thread and a save end, and exit
with `ExitCode.RESTART_REQUESTED`.

JAX's coordination service needs 8 s to notice a dead process, and takes a stopped
process for dead. It aborts in C++, and neither names the process nor uses our exit code
(measured with JAX 0.10.2).
"""
