"""Exports a model as a program that runs without the code that trained it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax import export

from armillary._checks import (
    answers_old_names,
    check_callable,
    check_instance,
    check_methods,
    check_one_of,
    list_lines,
)
from armillary._logging import logger
from armillary._process import get_process
from armillary.actions._export_files import temporary_name
from armillary.actions._whole_files import write_whole
from armillary.checkpoint._joint import announcing_errors
from armillary.distribute._global_arrays import as_local, is_key
from armillary.state._lift import State
from armillary.state._walk import Walk
from armillary.typing import Output, PyTree

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@answers_old_names(
    signatures="Pass one function as `model`, and examples of its arguments as `args`.",
    options="`platforms` says what the program is for.",
)
class ExportModel:
    """Exports a function of a model, its parameters inside, by `jax.export`.

    Each call writes one file, which needs only JAX to be loaded and called::

        def predict(images):
            model.eval()
            return model(images)

        export = armillary.actions.ExportModel(
            predict,
            armillary.actions.ExportFileManager(
                "runs/digits/export", max_to_keep=3, next_id_fn=optimizer.step),
            args=(jax.ShapeDtypeStruct((1, 28, 28), "float32"),),
            polymorphic_batch_size=True)

        exported = jax.export.deserialize(Path("runs/digits/export-1000").read_bytes())
        probabilities = exported.call(images)

    A file has its name only when it is complete. Training is not disturbed: the
    function is traced with copies of the arrays, and what it sets in Python (such as
    `model.eval()`) is set back. Of several processes, the chief writes.

    Orbit's `ExportSavedModel` exports several `signatures` with the variables beside
    them. Here each function is an action of its own.

    Args:
        model: The function to export: a model that can be called, a method, or a
            function such as `predict` above. It must not change arrays that it
            reaches: an export has nowhere to keep them.
        file_manager: Names the files and removes old ones.
        args: The arguments to trace `model` with: arrays or `jax.ShapeDtypeStruct`, or
            pytrees of them. Shapes may be symbolic (`jax.export.symbolic_shape`).
        polymorphic_batch_size: Whether the program takes any size of the first axis of
            all arguments (of those that have axes), the same for all.
        platforms: What the program may run on: `"cpu"`, `"cuda"`, `"rocm"`, `"tpu"`, or
            several of them. By default what this program runs on.

    Raises:
        TypeError: If `model` cannot be called, `file_manager` lacks a method, or `args`
            is not a tuple.
        ValueError: If `polymorphic_batch_size` is neither true nor false, if a platform
            is none of those, or if a shape has a `None`.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        file_manager: Any,
        *,
        args: tuple[PyTree, ...],
        polymorphic_batch_size: bool = False,
        platforms: str | Sequence[str] | None = None,
    ) -> None:
        check_callable("model", model)
        check_methods(
            "file_manager",
            file_manager,
            ("next_name", "clean_up"),
            'Use `armillary.actions.ExportFileManager("runs/digits/export")`.',
        )
        check_instance("args", args, tuple, "Use `args=(images,)` for one argument.")
        check_one_of("polymorphic_batch_size", polymorphic_batch_size, (True, False))
        if platforms is not None:
            kinds, fix = str | list | tuple, 'Use `platforms=["cpu", "tpu"]`.'
            check_instance("platforms", platforms, kinds, fix)
            # JAX takes any name, and such a program runs nowhere.
            for platform in [platforms] if isinstance(platforms, str) else platforms:
                check_one_of("platforms", platform, _PLATFORMS, "Use several of these.")
            platforms = (platforms,) if isinstance(platforms, str) else tuple(platforms)
        self.model = model
        self.file_manager = file_manager
        self._specs = _describe(args, is_polymorphic=polymorphic_batch_size)
        self._platforms = platforms

    def __call__(self, output: Output = None) -> None:
        """Exports the model as it is now. All processes must call it.

        Args:
            output: Not used.

        Raises:
            ValueError: If the function changes arrays, or needs several devices.
            OSError: If the file cannot be written. Earlier ones are as they were.
        """
        del output
        state = State([(self.model, "")])
        # On all processes: computations on shared arrays must be made by all.
        leaves = [as_local(leaf) for leaf in state.read()]
        if not get_process().is_chief:
            return
        with announcing_errors():
            data = self._export(state, leaves).serialize()
            path = epath.Path(self.file_manager.next_name())
            write_whole(path, data, temporary_name(path.name))
            self.file_manager.clean_up()
        logger.info("exported the model to %s.", path)

    def _export(self, state: State, leaves: Sequence[Any]) -> export.Exported:
        """Returns the program.

        Raises:
            ValueError: If the function changes arrays, or needs several devices.
        """
        hosts = [_as_host(leaf) for leaf in leaves]

        # Not `self.model`: a program is traced once for each function.
        def program(*args: Any) -> Any:
            constants = [make() for make in hosts]
            with state.swapped(constants):
                result = self.model(*args)
                changed = [
                    path
                    for path, old, new in zip(
                        state.paths, constants, state.read(), strict=True
                    )
                    if old is not new
                ]
            if changed:
                raise ValueError(_changed_message(changed))
            return result

        before = Walk(state.roots)
        try:
            exported = export.export(jax.jit(program), platforms=self._platforms)(
                *self._specs
            )
        finally:
            before.restore(before.reached_from(None))
        if exported.nr_devices > 1:
            raise ValueError(
                f"`model` became a program for {exported.nr_devices} devices, but an "
                "export is for one. Leave out constraints of sharding, and keep its "
                "arrays in a module or in attributes of an object."
            )
        return exported


def _describe(args: tuple[PyTree, ...], *, is_polymorphic: bool) -> tuple[PyTree, ...]:
    """Returns the shapes and dtypes to trace a program with."""
    (batch,) = export.symbolic_shape("batch")

    def describe(leaf: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            leaf = np.asarray(leaf)
            leaf = jax.ShapeDtypeStruct(
                leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype)
            )
        shape = tuple(leaf.shape)
        if is_polymorphic and shape:
            shape = (batch, *shape[1:])
        if None in shape:
            raise ValueError(
                f"`args` has the shape {shape}, but JAX has no `None` in shapes. "
                "Use 1 and `polymorphic_batch_size=True` for the first axis, and "
                "`jax.export.symbolic_shape` for others."
            )
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(describe, args)


def _as_host(leaf: Any) -> Callable[[], jax.Array]:
    """Returns what makes a constant, on one device, of an array on any."""
    if is_key(leaf):
        data, impl = np.array(jax.random.key_data(leaf)), jax.random.key_impl(leaf)
        return lambda: jax.random.wrap_key_data(jnp.asarray(data), impl=impl)
    host = np.asarray(leaf)
    return lambda: jnp.asarray(host)


def _changed_message(paths: Sequence[str]) -> str:
    return (
        f"`model` changes {len(paths)} of the arrays that it reaches, but an exported "
        f"program has nowhere to keep them:\n{list_lines(paths)}\n"
        "If it is in training mode (dropout, batch statistics), export a function that "
        "calls `model.eval()` before the model; the mode is set back afterwards."
    )
