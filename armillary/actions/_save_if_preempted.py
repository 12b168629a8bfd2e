"""Handles preemption: saves and ends the program before a machine is taken away."""

import sys

from armillary._checks import check_instance
from armillary._logging import logger
from armillary._process import ExitCode
from armillary.checkpoint._manager import CheckpointManager
from armillary.cluster._join import get_peers
from armillary.cluster._preemption import PreemptionNotice, TerminationConfig, kept
from armillary.errors import CheckpointError
from armillary.typing import Output


class SaveCheckpointIfPreempted:
    """Saves after SIGTERM, in all processes at the same step, and ends the program.

    When the same program is started again, it continues from there. Use it in the
    `train_actions` of a controller; `docs/long_runs/preemption.md` has an example.

    A notice is SIGTERM in any process of the job, or a result of the `watcher`. It is
    received as soon as the object exists, and handled after the current training loop.
    If the object is also one of `eval_actions`, a notice is handled after an evaluation
    as well. A run that resumes there repeats the evaluation. Further SIGTERMs change
    nothing, because the program is already ending.

    The end of the `with` block, or `close`, restores the former handler of SIGTERM. In
    between, a handler that the program had before is not called. Put its work into
    `exit_fn`.

    Args:
        checkpoint_manager: The manager that saves; use the manager of the controller.
        termination_config: The source of notices, and the way to end the program. By
            default SIGTERM, and exit code 77.

    Raises:
        TypeError: If `checkpoint_manager` or `termination_config` is of the wrong type.
        ValueError: If this is not the main thread.
    """

    def __init__(
        self,
        checkpoint_manager: CheckpointManager,
        termination_config: TerminationConfig | None = None,
    ) -> None:
        fix = "Use the manager of the controller."
        check_instance("checkpoint_manager", checkpoint_manager, CheckpointManager, fix)
        fix = "Use `TerminationConfig(exit_fn=leave)`."
        kinds = TerminationConfig | None
        check_instance("termination_config", termination_config, kinds, fix)
        config = termination_config or TerminationConfig()
        self._manager = checkpoint_manager
        self._exit_fn = config.exit_fn
        self._notice = PreemptionNotice(config.watcher)
        self._has_acted = False

    def __enter__(self) -> "SaveCheckpointIfPreempted":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, output: Output = None) -> None:
        """Saves and ends the program, if a process of the job has got a notice.

        All processes must call it. Without a notice, it costs one exchange of messages.

        Raises:
            CheckpointError: If the state cannot be saved. The exit code is then not 77.
            PeerError: If a process has failed.
        """
        del output
        self._notice.listen()
        found = self._find_notice()
        if found is None:
            return
        self._has_acted = True
        try:
            path = self._save()
        except CheckpointError:
            logger.error("preempted: %s, but this step is not saved.", found)
            raise
        # Any notice from now on is a new notice.
        self._has_acted = False
        self._notice.source = None

        code = ExitCode.PREEMPTED
        ending = f"ends with exit code {code.value} ({code.name})"
        if self._exit_fn:
            ending = "calls `exit_fn`"
        logger.info("preempted: %s; saved %s; %s.", found, path, ending)
        # A later signal must not change the exit code while the processes disconnect.
        kept.add(self._notice)
        if self._exit_fn is None:
            sys.exit(code)
        self._exit_fn()  # If it raises an error, that ends the program, too.
        kept.remove(self._notice)

    def close(self) -> None:
        """Stops watching for notices, and restores the former handler of SIGTERM.

        A notice that came after the last loop is not handled any more.
        """
        notice = self._notice
        is_over = self._has_acted or notice.is_closed or notice in kept
        if notice.source is not None and not is_over:
            text = "%s came after the last loop, so nothing was saved because of it."
            logger.warning(text, notice.source)
        notice.close()

    def _own_value(self) -> str | None:
        return self._notice.source

    def _find_notice(self) -> str | None:
        """Returns the source of a notice, if any; all processes return the same."""
        peers = get_peers()
        if peers.is_alone:
            return self._notice.source
        topic = "whether a machine will be taken away"
        sources = peers.boundary.exchange(topic, self._own_value)
        noticed = [index for index, source in enumerate(sources) if source]
        if not noticed:
            return None
        first = noticed[0]
        more = f", and in {len(noticed) - 1} more" if len(noticed) > 1 else ""
        return f"{sources[first]} in process {first} of {peers.count}{more}"

    def _save(self) -> str | None:
        """Saves, unless this step is saved already; returns the path."""
        manager = self._manager
        manager.sync()
        if manager.has_saved_step():
            return manager.latest_checkpoint
        path = manager.save()
        manager.sync()
        return path
