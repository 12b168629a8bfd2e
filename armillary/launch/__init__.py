"""The command `armillary launch`: runs a job of several processes.

A *worker* is one process of the job, a term of `TF_CONFIG`. One *attempt* reserves a
place for every worker, on this machine (`_machines.py`) or in a Ray cluster
(`_ray.py`). It starts the workers, passes on signals, and ends when all workers have
ended. A restart is another attempt. An *evaluator* may run next to the workers: it
continues while they are restarted, and is restarted alone. One event loop supervises,
and threads write the output of the processes. So the launcher passes on a signal even
if its terminal is paused.
"""

from armillary._process import ExitCode as ExitCode

__all__ = ["ExitCode"]
