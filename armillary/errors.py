"""Exceptions that a program may want to catch.

Each one derives from `ArmillaryError` and from the nearest builtin, so that both
`except armillary.errors.ArmillaryError` and `except ValueError` work.
"""

from collections.abc import Mapping, Sequence


class ArmillaryError(Exception):
    """Base of every exception that Armillary defines."""


class StateStructureError(ArmillaryError, ValueError):
    """A step changed the shape, dtype or tree structure of its state.

    Args:
        message: The text of the error.
        changes: A line for each change, with the path of the array or object.
    """

    def __init__(self, message: str = "", *, changes: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.changes = tuple(changes)


class CapturedStateError(ArmillaryError, ValueError):
    """A step reads or writes state that is not reachable from the trainer."""


class ReplicaMismatchError(ArmillaryError, ValueError):
    """A mirrored slot ended a step with a value that differs between replicas."""


class DoubleReductionError(ArmillaryError, ValueError):
    """A reduction over replicas would count a value too often, or divide it twice."""


class ReplicaContextError(ArmillaryError, RuntimeError):
    """A function was called in the wrong context: inside `run`, or outside."""


class ThreadError(ArmillaryError, RuntimeError):
    """Two threads were about to run steps with the same state at the same time."""


class BatchSizeError(ArmillaryError, ValueError):
    """A batch cannot be shared equally between replicas."""


class RetraceError(ArmillaryError, ValueError):
    """Batches changed structure, shape or dtype after the step was compiled."""


class DatasetStateError(ArmillaryError, ValueError):
    """A data source cannot be repositioned, or the position does not fit it."""


class StaleStateError(ArmillaryError, RuntimeError):
    """Training data reads state that other steps have replaced, or will replace."""


class TFRecordError(ArmillaryError, ValueError):
    """A TFRecord file is damaged, or its records do not hold the features."""


class GlobalStepError(ArmillaryError, RuntimeError):
    """The global step did not advance, or not by the number of steps that were run."""


class NonFiniteError(ArmillaryError, FloatingPointError):
    """A step left values in its state that are not finite.

    Args:
        message: The text of the error.
        step: The global step that the step would have reached; `None` if unknown.
        leaves: The number of values that were not finite, by the path of the array.
    """

    def __init__(
        self,
        message: str = "",
        *,
        step: int | None = None,
        leaves: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.step = step
        self.leaves = dict(leaves or {})


class ReplicaDivergenceError(ArmillaryError, RuntimeError):
    """Replicas hold different values of state that is mirrored.

    Args:
        message: The text of the error.
        leaves: The replicas that differ from the majority, by the path of the array;
            all replicas if there is no majority.
    """

    def __init__(
        self, message: str = "", *, leaves: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        super().__init__(message)
        self.leaves = dict(leaves or {})


class ClusterError(ArmillaryError, ValueError):
    """The environment of a process does not describe a cluster that can be used."""


class PeerError(ArmillaryError, RuntimeError):
    """The processes of a job do not agree, or one of them failed or does not answer."""


class EstimatorError(ArmillaryError, ValueError):
    """An estimator was given a function, or is used in a way, that cannot work."""


class OutOfRangeError(ArmillaryError, IndexError):
    """The data of a worker has ended (`tf.errors.OutOfRangeError`)."""


class PSUnavailableError(ArmillaryError, RuntimeError):
    """A parameter server is lost, and the values of its variables are lost with it.

    As in `tf.distribute.coordinator`, restore the last checkpoint and continue.
    """


class ClosureCancelledError(ArmillaryError, RuntimeError):
    """A scheduled call did not run, because another call failed."""


class PlanError(ArmillaryError, RuntimeError):
    """A step cannot be compiled for devices that this machine does not have."""


class CheckpointError(ArmillaryError, RuntimeError):
    """A checkpoint cannot be written or read."""


class CheckpointDamageError(CheckpointError):
    """A file of a checkpoint is missing, changed or cannot be read.

    Args:
        message: The text of the error.
        damage: A sentence on the file and its problem.
    """

    def __init__(self, message: str = "", *, damage: str = "") -> None:
        super().__init__(message)
        self.damage = damage


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint and the program that restores it have different leaves."""
