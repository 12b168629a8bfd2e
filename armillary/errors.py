"""Exceptions that a program may want to catch.

Each one derives from `ArmillaryError` and from the nearest builtin, so that both
`except armillary.errors.ArmillaryError` and `except ValueError` work::

    ArmillaryError
    |-- StateStructureError (ValueError)     a step changed a slot's shape or tree
    |-- CapturedStateError (ValueError)      a step uses state it does not reach
    |-- ReplicaMismatchError (ValueError)    mirrored state ended with unequal values
    |-- DoubleReductionError (ValueError)    an already summed value is reduced again
    |-- ReplicaContextError (RuntimeError)   a call in the wrong context
    |-- BatchSizeError (ValueError)          a batch that replicas cannot share equally
    |-- RetraceError (ValueError)            batches changed after compilation
    |-- DatasetStateError (ValueError)       a data position that cannot be used
    |-- GlobalStepError (RuntimeError)       the global step did not advance as it must
    |-- ClusterError (ValueError)            the environment describes no usable cluster
    |-- PeerError (RuntimeError)             the processes of a job do not agree
    `-- CheckpointError (RuntimeError)       a checkpoint cannot be written or read
        `-- CheckpointMismatchError (ValueError)   it holds other leaves
"""


class ArmillaryError(Exception):
    """Base of every exception that Armillary defines."""


class StateStructureError(ArmillaryError, ValueError):
    """A step changed the shape, dtype or tree structure of its state."""


class CapturedStateError(ArmillaryError, ValueError):
    """A step reads or writes state that is not reachable from the trainer."""


class ReplicaMismatchError(ArmillaryError, ValueError):
    """A mirrored slot ended a step with a value that differs between replicas."""


class DoubleReductionError(ArmillaryError, ValueError):
    """A value that is equal on all replicas was reduced over replicas again."""


class ReplicaContextError(ArmillaryError, RuntimeError):
    """A function was called in replica context that needs the other, or vice versa."""


class BatchSizeError(ArmillaryError, ValueError):
    """A batch cannot be shared equally between replicas."""


class RetraceError(ArmillaryError, ValueError):
    """Batches changed structure, shape or dtype after the step was compiled."""


class DatasetStateError(ArmillaryError, ValueError):
    """A data source cannot be repositioned, or the position does not fit it."""


class GlobalStepError(ArmillaryError, RuntimeError):
    """The global step did not advance by the number of steps that were run."""


class ClusterError(ArmillaryError, ValueError):
    """The environment of a process does not describe a cluster that can be used."""


class PeerError(ArmillaryError, RuntimeError):
    """The processes of a job do not agree, or one of them failed or is silent."""


class CheckpointError(ArmillaryError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint holds other leaves than the program it is restored into."""
