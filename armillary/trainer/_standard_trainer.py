"""The training loop that most programs need, modeled on Orbit's `StandardTrainer`."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax

from armillary._checks import check_positive_int
from armillary._logging import logger
from armillary._traceback import hides_frames
from armillary.data._dataset import DistributedDataset
from armillary.data.sources._source import may_be_missing, returns_position
from armillary.distribute._strategy import Strategy
from armillary.errors import DatasetStateError
from armillary.trainer._claims import claimed
from armillary.trainer._contract import AbstractTrainer, PendingLoops
from armillary.trainer._datasets import flatten_datasets
from armillary.trainer._hook_code import BEGIN, END
from armillary.trainer._loop import Loop, find_loop
from armillary.trainer._loop_guard import LoopCheck
from armillary.trainer._method_names import check_hooks
from armillary.trainer._no_data import NoBatches
from armillary.trainer._options import StandardTrainerOptions
from armillary.trainer._runner import Runner
from armillary.trainer._setup import Setup, make_setup
from armillary.trainer._step_method import check_step_signature
from armillary.typing import Output, PyTree


class StandardTrainer(Runner, AbstractTrainer):
    """Runs `train_step` many times for each call of `train`.

    In outline::

        train_loop_begin()                  # Python, once per loop
        for _ in range(num_steps):          # one device program per chunk
            train_step(iterator)
        return train_loop_end()             # Python, once per loop

    Everything the step reads or writes must be reachable from the trainer: assign
    model, optimizer, metrics and other state to `self`. A strategy that is assigned to
    `self` is in effect, unless the program has put another strategy in effect.

    A loop reuses the memory of the previous loop's state. The output of
    `train_loop_end` is safe, but copy an array that you take out of a variable between
    loops (`variable[...].copy()`). `Checkpoint(trainer=trainer)` saves all of the
    state, and the position in the data if the data has positions.

    Args:
        train_dataset: A dataset from `make_distributed_dataset`, anything that
            `armillary.data.as_source` takes, or a nest (list, dict, ...) of them.
            `None` if the step makes its own data and takes no batch.
        options: How to run; see `StandardTrainerOptions`.

    Raises:
        TypeError: If `train_dataset` or `options` is of the wrong type.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        del args, kwargs
        check_hooks(cls, StandardTrainer, BEGIN, "train_step", END)
        return super().__new__(cls)

    def __init__(
        self, train_dataset: PyTree, options: StandardTrainerOptions | None = None
    ) -> None:
        kind = StandardTrainerOptions
        self._train_setup = make_setup("train_dataset", train_dataset, options, kind)

    @property
    def train_dataset(self) -> PyTree:
        """The dataset, or nest of datasets. You may assign a new one."""
        return self._get_train().datasets

    @train_dataset.setter
    def train_dataset(self, train_dataset: PyTree) -> None:
        self._get_train().datasets = train_dataset

    def train_loop_begin(self) -> None:
        """Prepares a loop, such as by resetting metrics; override as needed."""

    @abc.abstractmethod
    def train_step(self, iterator: Any) -> None:
        """Runs one step: override.

        It is traced once and compiled, so it must be written with `jax.numpy` and may
        not depend on values in Python. Its result is dropped.

        Args:
            iterator: An iterator with the structure of `train_dataset`. Each `next` on
                it gives one global batch, for `strategy.run`. Without data, `next`
                raises a `TypeError`.
        """

    def train_loop_end(self) -> Output:
        """Returns the loop's output, such as computed metrics; override as needed.

        Values are scalars, or a `Histogram`, an `Image` or a `Text` of
        `armillary.summary`. Arrays with axes also reach log lines and actions. With the
        controller's `summary_dir`, they are written as histograms.
        """
        return None

    @hides_frames
    def train(self, num_steps: int) -> Output:
        """Runs `num_steps` steps, or fewer if the data ends before.

        Args:
            num_steps: Steps to run, at least 1.

        Returns:
            The output of `train_loop_end`; `None` if there was no data for any step.
            `data_exhausted` shows whether the data ended.

        Raises:
            TypeError: If the constructor of this class was not called.
            ValueError: If `num_steps` is below 1, or the dataset belongs to another
                strategy.
            StateStructureError: If a step changes the structure of the state.
            CapturedStateError: If a step uses state that the trainer does not reach.
            RetraceError: If batches change their shape.
            NonFiniteError: If a step left values that are not finite, and
                `on_non_finite` is `"raise"`.
            ThreadError: If another thread runs steps with the same state.
            StaleStateError: If the data reads the state of the trainer, and is read
                ahead.
            ReplicaDivergenceError: If `check_replicas_every` found copies that differ.
        """
        started = self._start(num_steps, 1)
        started.check()
        return started.outputs()[0]

    @may_be_missing
    @returns_position
    def get_state(self) -> list[Any]:
        """Returns the position in each dataset; `None` for data without positions.

        Through this method, `Checkpoint(trainer=trainer)` saves the position in the
        data.
        """
        return [dataset and dataset.get_state() for dataset in self._positions()]

    def set_state(self, state: list[Any]) -> None:
        """Continues in the data at a saved position.

        Raises:
            DatasetStateError: If `state` has positions for more or fewer datasets, or
                a dataset refuses its position.
        """
        datasets = self._positions()
        if not datasets and not any(state):
            return
        if len(state) != len(datasets):
            raise DatasetStateError(
                f"`state` holds the positions of {len(state)} datasets, but "
                f"`train_dataset` has {len(datasets)}. Give the trainer as many."
            )
        for dataset, position in zip(datasets, state, strict=True):
            if dataset is not None and position is not None:
                dataset.set_state(position)

    def _positions(self) -> list[DistributedDataset | None]:
        """Returns the datasets that have positions, and `None` for all others."""
        setup = self._get_train()
        parts, _ = flatten_datasets(setup.datasets)
        with self._in_strategy() as strategy:
            if strategy.loop_class is not None:
                return [None] * len(parts)  # Workers have data of their own.
            is_raw = not all(isinstance(part, DistributedDataset) for part in parts)
            if is_raw and not self._has_own_train():
                parts = setup.hold(strategy)

        datasets: list[DistributedDataset | None] = []
        lost: list[str] = []
        for part in parts:
            is_ours = isinstance(part, DistributedDataset)
            has_position = is_ours and part.is_repositionable
            datasets.append(part if has_position else None)
            if is_ours and not has_position:
                lost.append(part.source_name)
        if lost and not setup.has_warned:
            setup.has_warned = True
            _warn_of_lost_positions(lost, is_made=not setup.options.read_ahead)
        return datasets

    def prepare(self, steps_per_loop: int) -> None:
        """Receives the number of steps in a loop, which sets the size of chunks."""
        if not self._has_own_train():
            self._get_train().steps_per_loop = steps_per_loop

    def begin_epoch(self, epochs: int) -> int:
        """Begins the next pass over the data; see `AbstractTrainer.begin_epoch`.

        Raises:
            ValueError: If the data repeats itself forever, or the trainer has several
                datasets, or a `train` of its own, or trains asynchronously.
        """
        if self._has_own_train():
            return super().begin_epoch(epochs)
        with self._in_strategy() as strategy:
            if strategy.loop_class is not None:
                return strategy.loop_class.begin_epoch(epochs)
            return self._find_loop(strategy).begin_epoch(epochs)

    def start(self, num_steps: int, num_loops: int) -> PendingLoops:
        """Starts loops; see `AbstractTrainer.start`.

        After a step that stops training, no later step has an effect. So a caller may
        start the next loops before it reads the outputs of these loops.
        """
        if self._has_own_train():
            return super().start(num_steps, num_loops)
        return self._start(num_steps, num_loops)

    def _get_train(self) -> Setup:
        return self._get_setup("_train_setup", "train_dataset")

    def _has_own_train(self) -> bool:
        return type(self).train is not StandardTrainer.train or "train" in vars(self)

    def _find_loop(self, strategy: Strategy) -> Loop:
        setup = self._get_train()
        method = self._get_method(setup, strategy, "train_step")
        return find_loop(setup, method)

    def _start(self, num_steps: int, num_loops: int) -> "LoopsOnDevice":
        """Starts one loop or several, with the hooks in the program or around it."""
        check_positive_int("num_steps", num_steps)
        setup = self._get_train()
        with claimed(self, "trains"), self._in_strategy() as strategy:
            if strategy.loop_class is not None:
                return self._start_elsewhere(setup, strategy, num_steps)

            loop = self._find_loop(strategy)
            loop.set_chunk_size(setup.steps_per_loop or num_steps)
            self.data_exhausted = not loop.has_data()
            if self.data_exhausted:
                return LoopsOnDevice(0, (), lambda _: [None])

            # The hooks are in the program, if they need no Python.
            count = loop.count_loops(num_steps, num_loops)
            if count:
                arrays, make = loop.run_loops(num_steps, count)
                started = LoopsOnDevice(num_steps * count, arrays, make)
                started.note_work(loop)
                return started

            # The hooks run in Python.
            self.train_loop_begin()
            num_run = loop.run(num_steps)
            self.data_exhausted = num_run < num_steps
            check = loop.check()
            try:
                output = loop.detach(self.train_loop_end())
            except BaseException as error:
                loop.end_after_error(error)
                raise
            started = LoopsOnDevice(num_run, (), lambda _: [output], check)
            started.note_work(loop)
            return started

    def _start_elsewhere(
        self, setup: Setup, strategy: Strategy, num_steps: int
    ) -> "LoopsOnDevice":
        """Runs a loop of the strategy's own class, such as on workers."""
        loop = setup.loop
        is_of_strategy = isinstance(loop, strategy.loop_class)
        if not is_of_strategy or not loop.serves(setup.datasets, strategy):
            loop = setup.loop = self._make_loop(setup, strategy)
        self.train_loop_begin()
        num_run = loop.run(num_steps)
        self.data_exhausted = num_run < num_steps
        output = self.train_loop_end() if num_run else None
        output = loop.add_staleness(output)
        return LoopsOnDevice(num_run, (), lambda _: [output])

    def _make_loop(self, setup: Setup, strategy: Strategy) -> Any:
        """Makes a loop of the strategy's own class."""
        loop_class = strategy.loop_class
        loop_class.check_options(setup.options, StandardTrainerOptions())
        check_step_signature(self.train_step, type(self).__name__)
        # Only this process needs the datasets and loops of the trainer, or of an
        # evaluator that it holds.
        held: list[Any] = []
        for value in vars(self).values():
            if isinstance(value, Setup | DistributedDataset):
                held.append(value)
        step = self.train_step
        iterators = None
        if setup.datasets is None:
            iterators = NoBatches("train_dataset", step.__name__)
        return loop_class(
            step, strategy, setup.datasets, iterators=iterators, left_out=held
        )


def _warn_of_lost_positions(source_names: Sequence[str], *, is_made: bool) -> None:
    """Warns that no checkpoint has a position in these sources.

    `is_made` says that the program makes the data itself, such as from games.
    """
    shown = ", ".join(source_names)
    if is_made:
        logger.info(
            "The training data (%s) has no position, so a run that resumes reads "
            "it from its beginning. Name the objects that make the data in the "
            "checkpoint: `Checkpoint(trainer=trainer, game=game)`.",
            shown,
        )
        return
    logger.warning(
        "No checkpoint holds the position in the training data (%s), because "
        "the data has no position. A run that resumes reads it from its "
        "beginning, and counts `epochs` from 0. Use "
        "`armillary.data.from_arrays`, Grain, TFRecords, a loader with "
        "`state_dict` and `load_state_dict`, or an iterator with `get_state` "
        "and `set_state` (docs/data/positions.md).",
        shown,
    )


def find_positions(trainer: StandardTrainer) -> list[DistributedDataset | None]:
    """Returns the training data whose position can be saved, and `None` for other data.

    Warns once of data without a position.
    """
    return trainer._positions()


class LoopsOnDevice(PendingLoops):
    """Loops whose outputs are `make(arrays)`, with arrays on the device."""

    may_overlap = True

    def __init__(
        self,
        num_steps: int,
        arrays: Sequence[jax.Array],
        make: Callable[[Sequence[Any]], list[Output]],
        loop_check: LoopCheck | None = None,
    ) -> None:
        self.num_steps = num_steps
        self._check = loop_check
        self._arrays = arrays
        self._make = make

    def note_work(self, loop: Loop) -> None:
        self.work = loop.take_work()
        self.footprint = loop.footprint

    def change(self, change: Callable[[Output], Output]) -> None:
        """Applies `change` to each output when it is fetched."""
        make = self._make
        self._make = lambda arrays: list(map(change, make(arrays)))

    def outputs(self) -> list[Output]:
        """Returns the output of each loop, without waiting."""
        return self._make(self._arrays)

    def fetch(self) -> list[Output]:
        self._arrays = jax.device_get(self._arrays)
        if self._check is not None:
            self._check.fetch()
        return self.outputs()

    def check(self, step: int | None = None) -> None:
        if self._check is not None:
            self._check.resolve(step)
