"""Saves and ends the program when a machine of the job is going to be taken."""

import sys
import time
from typing import NoReturn

from armillary._checks import check_instance, check_one_of
from armillary._logging import logger
from armillary._process import ExitCode
from armillary.checkpoint._manager import CheckpointManager
from armillary.cluster._join import get_peers
from armillary.cluster._preemption import PreemptionNotice, TerminationConfig
from armillary.errors import CheckpointError
from armillary.typing import Output


class SaveCheckpointIfPreempted:
    """Saves after SIGTERM, in all processes at the same step, and ends the program.

    The same program goes on from there when it is started again::

        with armillary.actions.SaveCheckpointIfPreempted(manager) as save_if_preempted:
            controller = armillary.Controller(
                ..., checkpoint_manager=manager, train_actions=[save_if_preempted])
            controller.train(steps=100_000)

    SIGTERM in any process of the job, or its `watcher`, is a notice. It is heard from
    the moment that the object is made, and acted on after the loop of training that is
    running; as one of `eval_actions`, after an evaluation as well. Put it last, so that
    the state of other actions is saved as they left it. Further SIGTERMs change
    nothing: the program is ending.

    Leaving the `with` block, or `close`, gives SIGTERM its former meaning again. A
    handler that the program had before is not called in between; what it did belongs
    into `exit_fn`.

    Args:
        checkpoint_manager: Saves. It should be the controller's.
        termination_config: How a notice comes, how much time it leaves, and how the
            program ends. By default SIGTERM, none, and exit code 77.
        keep_running_after_save: Whether training goes on after the save, for machines
            that are only moved. The next notice saves again.

    Raises:
        TypeError: If `checkpoint_manager` or `termination_config` is of the wrong type.
        ValueError: If `keep_running_after_save` meets a configuration that says when or
            how to end.
        RuntimeError: If this is not the main thread.
    """

    def __init__(
        self,
        checkpoint_manager: CheckpointManager,
        termination_config: TerminationConfig | None = None,
        *,
        keep_running_after_save: bool = False,
    ) -> None:
        fix = "Use that of the controller."
        check_instance("checkpoint_manager", checkpoint_manager, CheckpointManager, fix)
        kinds, fix = (
            TerminationConfig | None,
            "Use `TerminationConfig(grace_period=9)`.",
        )
        check_instance("termination_config", termination_config, kinds, fix)
        check_one_of("keep_running_after_save", keep_running_after_save, (True, False))
        config = termination_config or TerminationConfig()
        if keep_running_after_save and (config.grace_period or config.exit_fn):
            raise ValueError(
                "`keep_running_after_save` is True, but `termination_config` has "
                f"grace_period={config.grace_period!r} and exit_fn={config.exit_fn!r}, "
                "which say when and how to end. Leave them out."
            )
        self._manager = checkpoint_manager
        self._exit_fn = config.exit_fn or _exit
        self._keeps_running = keep_running_after_save
        self._grace_seconds = config.grace_period or 0.0
        self._last_call, self._pause = time.monotonic(), 0.0
        # Until when training may go on.
        self._end = 0.0
        self._found: str | None = None
        self._notice = PreemptionNotice(config.watcher)

    def __enter__(self) -> "SaveCheckpointIfPreempted":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, output: Output = None) -> None:
        """Saves and ends the program, if a process of the job has got a notice.

        All processes must call it. Without a notice, it costs them one exchange.

        Args:
            output: Not used.

        Raises:
            CheckpointError: If the state cannot be saved. The exit code is then not
                that of a preemption.
            PeerError: If a process has failed.
        """
        del output
        self._notice.listen()
        before, self._last_call = self._last_call, time.monotonic()
        self._pause = self._last_call - before
        is_new = self._found is None
        if is_new:
            self._found = self._find_notice()
            if self._found is None:
                return
            # Python hears a signal when the main thread does not wait for the device:
            # it came after the call before. Half of the period is for the last save.
            self._end = before + self._grace_seconds / 2
        elif self._may_go_on():
            return
        try:
            saved = self._save()
            said = f"preempted: {self._found}; saved {saved or 'nothing'}"
            if is_new and self._may_go_on():
                logger.info("%s; trains on for a part of the grace period.", said)
                return
            # A manager that only warns has kept this error for itself.
            error = self._manager.last_error
            if error is not None and not self._keeps_running:
                raise error
        except CheckpointError:
            logger.error("preempted: %s, but this step is not saved.", self._found)
            raise
        # Whatever comes from now on is another notice.
        self._found = None
        self._notice.clear()
        if self._keeps_running:
            logger.info("%s; training goes on.", said)
            return
        code = ExitCode.PREEMPTED
        ending = f"ends with exit code {code.value} ({code.name})"
        ending = ending if self._exit_fn is _exit else "calls `exit_fn`"
        logger.info("%s; %s.", said, ending)
        with self._notice.kept():
            self._exit_fn()

    def close(self) -> None:
        """Stops listening, and gives SIGTERM its former meaning.

        A notice that came after the last loop is not acted on any more.
        """
        is_missed = self._notice.source is not None and self._found is None
        if is_missed and not (self._notice.is_closed or self._notice.is_kept):
            logger.warning(
                "%s came after the last loop, so nothing was saved because of it.",
                self._notice.source,
            )
        self._notice.close()

    def _say(self) -> tuple[str | None, float]:
        """Returns what gave notice, and the time left if another loop runs."""
        return self._notice.source, self._end - time.monotonic() - self._pause

    def _find_notice(self) -> str | None:
        """Returns which process got a notice; all processes return the same."""
        peers = get_peers()
        if peers is None:
            return self._notice.source
        topic = "whether a machine is going to be taken"
        found = [
            f"{source} in process {index} of {peers.count}"
            for index, (source, _) in enumerate(
                peers.boundary.exchange(topic, self._say)
            )
            if source
        ]
        more = f", and in {len(found) - 1} more" if len(found) > 1 else ""
        return found[0] + more if found else None

    def _may_go_on(self) -> bool:
        """Returns whether all processes have the time for another loop."""
        if not self._grace_seconds:
            return False
        said, peers = [self._say()], get_peers()
        if peers is not None:
            said = peers.boundary.exchange("how long training may go on", self._say)
        return min(spare for _, spare in said) > 0

    def _save(self) -> str | None:
        """Saves, unless this step is saved; returns the path of what is."""
        manager = self._manager
        manager.sync()
        if manager.has_saved_step():
            return manager.latest_checkpoint
        path = manager.save()
        manager.sync()
        self._last_call = time.monotonic()  # A save is no part of a loop.
        return path if manager.last_error is None else None


def _exit() -> NoReturn:
    sys.exit(ExitCode.PREEMPTED)
