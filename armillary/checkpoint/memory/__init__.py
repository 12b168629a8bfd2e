"""Snapshots of a run in the memory of its machines, next to the checkpoints on disk.

A snapshot is divided into shares, one for each process. A process writes its own share
and a copy of another process's share into a folder in memory, which survives the
process. So after a fault, the processes that start next find the values there::

    /dev/shm/armillary-<user>-<digest of the directory>/
      process_1/snapshot_7/share_1.bin, share_1.json     its own share
                           share_0.bin, share_0.json     the copy for process 0

The folder is lost if the machine is. The copy of the share is on another machine, if
the job has several. If a share is lost with its copy, the disk has the values.
"""
