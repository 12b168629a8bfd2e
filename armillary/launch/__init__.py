"""The command `armillary launch`: runs a job of several processes.

A *worker* is one process of the job, a term of `TF_CONFIG`. One *attempt* starts all of
them and ends when all of them have ended; a restart is another attempt::

    for each attempt:
        reserve a place for every worker, start it with its `TF_CONFIG`
        while a worker runs:
            pass on signals
            if one failed: let the others end by themselves, then make them
        all ended well, or no restart is left: end with one exit code

Places are on this machine (`_process.py`), or on those of a Ray cluster (`_ray.py`). An
*evaluator* may run beside the workers: it goes on while they are restarted, and is
restarted alone. One event loop supervises and reads what processes say; one thread
writes it, so a paused terminal cannot keep the launcher from passing on a signal.
"""

from armillary._process import ExitCode as ExitCode

__all__ = ["ExitCode"]
