"""Exports a model to numbered files, by `jax.export`."""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath
from jax import export

from armillary._checks import (
    check_callable,
    check_instance,
    check_methods,
    check_one_of,
    check_positive_int,
    list_lines,
)
from armillary._dataflow import find_unchanged
from armillary._logging import logger
from armillary._process import get_process
from armillary._records import write_whole
from armillary.checkpoint._folder import as_absolute
from armillary.checkpoint._writer import announcing_errors
from armillary.distribute._global_arrays import as_local
from armillary.pretrained._files import INDEX, SHARDS, UNFINISHED, WHOLE
from armillary.state._lift import State
from armillary.state._step_counter import StepCounter, as_step_counter
from armillary.typing import Output, PyTree

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_USE_PLATFORMS = 'Use `platforms=["cpu", "tpu"]`.'


class ExportFileManager:
    """Names the files of one model, `<base_name>-<id>`, and removes old ones.

    `ExportModel` calls `next_name` before it writes, and `clean_up` after that. One
    program uses a base name at a time. `ExportSafetensors` makes folders of these
    names, which count if they hold a complete model.

    Args:
        base_name: The beginning of the file names, such as `"runs/digits/export"`. The
            first export makes its directory.
        max_to_keep: The number of files to keep: the files with the highest numbers,
            and always the newest file. `None` keeps all.
        next_id_fn: The number of the next file: a variable such as `optimizer.step`, or
            a function without arguments. If the number already exists, its file is
            replaced. `None` continues from the highest existing number, or from 0.

    Raises:
        TypeError: If `next_id_fn` is neither a variable nor a function.
        ValueError: If `max_to_keep` is neither `None` nor a positive integer.
    """

    def __init__(
        self,
        base_name: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        next_id_fn: Any = None,
    ) -> None:
        if max_to_keep is not None:
            max_to_keep = check_positive_int("max_to_keep", max_to_keep)
        self._base = as_absolute("base_name", base_name)
        self._max_to_keep = max_to_keep
        self._next_id: StepCounter | None = None
        if next_id_fn is not None:
            self._next_id = as_step_counter(next_id_fn, "next_id_fn")
        self._last_name: str | None = None

    @property
    def managed_files(self) -> list[str]:
        """Paths of the complete files, by increasing number."""
        return [str(path) for _, path in self._find()]

    def next_name(self) -> str:
        """Returns the path of the next file."""
        if self._next_id is not None:
            number = self._next_id()
        else:
            numbers = [found for found, _ in self._find()]
            number = max(numbers, default=-1) + 1
        self._last_name = f"{self._base}-{number}"
        return self._last_name

    def clean_up(self) -> None:
        """Removes all except `max_to_keep` files, and folders of killed exports."""
        for path in self._find_killed():
            path.rmtree(missing_ok=True)
        if self._max_to_keep is None:
            return
        # After a run went back to an earlier step, the newest file has a lower number.
        files = sorted(self.managed_files, key=lambda path: path == self._last_name)
        for path in files[: -self._max_to_keep]:
            _remove(epath.Path(path))

    def _find(self) -> list[tuple[int, epath.Path]]:
        """Returns the numbers and paths of the exports, by increasing number."""
        return [pair for pair in self._find_named() if _is_complete(pair[1])]

    def _find_killed(self) -> list[epath.Path]:
        """Returns folders that an export has begun to write, but not completed."""
        killed: list[epath.Path] = []
        for _, path in self._find_named():
            if not path.is_dir() or _is_complete(path):
                continue
            # Some files may have their names already, if only the index is missing.
            if any(path.glob(UNFINISHED)) or any(path.glob(SHARDS)):
                killed.append(path)
        return killed

    def _find_named(self) -> list[tuple[int, epath.Path]]:
        """Returns the numbers and paths of files and folders with these names."""
        pattern = re.compile(rf"{re.escape(self._base.name)}-(\d+)")
        folder = self._base.parent
        found: list[tuple[int, epath.Path]] = []
        for path in folder.iterdir() if folder.is_dir() else ():
            match = pattern.fullmatch(path.name)
            if match is not None:
                found.append((int(match[1]), path))
        return sorted(found)


def _is_complete(path: epath.Path) -> bool:
    """Returns whether a path is a file, or a folder with a model in safetensors."""
    return path.is_file() or any((path / name).is_file() for name in (WHOLE, INDEX))


def _remove(path: epath.Path) -> None:
    if path.is_file():
        path.unlink(missing_ok=True)
        return
    # ORDER: without these, a folder that is removed only in part is not an export.
    for name in (WHOLE, INDEX):
        (path / name).unlink(missing_ok=True)
    path.rmtree(missing_ok=True)


class ExportModel:
    """Exports a function of a model with its parameters, by `jax.export`.

    Each call writes one file. To load and call it, only JAX is needed
    (`jax.export.deserialize`). `docs/train/export.md` has an example.

    A file gets its name only when it is complete. Training is not disturbed: the
    function is traced with copies of the arrays, and values that it sets in Python
    (such as `model.eval()`) are set back. In a job of several processes, the chief
    writes.

    Args:
        model: The function to export, or a model that can be called. It must not change
            arrays that it reaches, because an export cannot store them.
        file_manager: Names the files and removes old ones.
        args: The arguments to trace `model` with: arrays or `jax.ShapeDtypeStruct`, or
            pytrees of them. Shapes may be symbolic (`jax.export.symbolic_shape`).
        polymorphic_batch_size: Whether the first axis of all arguments may have any
            size, the same for all. Arguments without axes do not count.
        platforms: The platforms of the exported program: `"cpu"`, `"cuda"`, `"rocm"`,
            `"tpu"`, or several of them. By default, the platform of this program.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `polymorphic_batch_size` is neither true nor false, or a platform
            is not one of these.
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
        fix = 'Use `armillary.actions.ExportFileManager("runs/digits/export")`.'
        check_methods("file_manager", file_manager, ("next_name", "clean_up"), fix)
        check_instance("args", args, tuple, "Use `args=(images,)` for one argument.")
        check_one_of("polymorphic_batch_size", polymorphic_batch_size, (True, False))
        platforms = [platforms] if isinstance(platforms, str) else platforms
        check_instance("platforms", platforms, list | tuple | None, _USE_PLATFORMS)
        # JAX accepts any name, but the program could not run anywhere.
        for platform in platforms or ():
            check_one_of("platforms", platform, _PLATFORMS, _USE_PLATFORMS)
        self.model = model
        self.file_manager = file_manager
        self._specs = _types_of(args, is_polymorphic=polymorphic_batch_size)
        self._platforms = platforms

    def __call__(self, output: Output = None) -> None:
        """Exports the model as it is now. All processes must call it.

        Raises:
            ValueError: If the function changes arrays, or needs several devices.
            OSError: If the file cannot be written. Earlier files are not changed.
        """
        del output
        state = State([(self.model, "")])
        # On all processes, because all must take part in computations on shared arrays.
        leaves = [as_local(leaf) for leaf in state.read()]
        if not get_process().is_chief:
            return
        with announcing_errors():
            data = self._export(state, leaves).serialize()
            path = epath.Path(self.file_manager.next_name())
            # If an export is killed, the next export overwrites its incomplete file.
            write_whole(path, data, f".{path.name.rpartition('-')[0]}.incomplete")
            self.file_manager.clean_up()
        logger.info("exported the model to %s.", path)

    def _export(self, state: State, leaves: Sequence[Any]) -> export.Exported:
        """Returns the exported program of the model, with the state as constants.

        Raises an error if the model changes its state, which an export cannot do.
        """
        device = jax.local_devices()[0]
        constants = [jax.device_put(leaf, device) for leaf in leaves]

        def call(leaves: list[Any], *args: Any) -> tuple[dict[int, Any], Any]:
            with state.swapped(leaves):
                result = self.model(*args)
                now = state.read()
            written: dict[int, Any] = {}
            for index, (old, new) in enumerate(zip(leaves, now, strict=True)):
                if old is not new:
                    written[index] = new
            return written, result

        # Not `self.model`, because JAX traces each function only once.
        def program(*args: Any) -> Any:
            written, result = call(constants, *args)
            touched[:] = written
            return result

        def find_written(leaves: list[Any], *args: Any) -> list[Any]:
            written, _ = call(leaves, *args)
            return list(written.values())

        touched: list[int] = []
        with state.attributes_kept():
            make = export.export(jax.jit(program), platforms=self._platforms)
            exported = make(*self._specs)
            if touched:
                # `nnx.remat` writes arrays that it only reads. The program shows which
                # arrays really change.
                traced = jax.make_jaxpr(find_written)(constants, *self._specs)
                is_same = find_unchanged(traced, touched)
                self._check_unchanged(state, touched, is_same)
        if exported.nr_devices > 1:
            raise ValueError(
                f"`model` became a program for {exported.nr_devices} devices, but an "
                "export is for one. Leave out constraints of sharding."
            )
        return exported

    def _check_unchanged(
        self, state: State, touched: list[int], is_same: list[bool]
    ) -> None:
        changed: list[str] = []
        for number, same in zip(touched, is_same, strict=True):
            if not same:
                changed.append(state.paths[number])
        if changed:
            raise ValueError(
                f"`model` changes {len(changed)} of the arrays that it reaches, "
                "but an exported program cannot store them:\n"
                f"{list_lines(changed)}\n"
                "Export a function that calls `model.eval()` first."
            )


def _types_of(args: tuple[PyTree, ...], *, is_polymorphic: bool) -> tuple[PyTree, ...]:
    """Returns the shapes and dtypes to trace a program with."""
    # Together with the sizes that the user has made, because JAX does not mix scopes.
    scope = _find_scope(args)
    (batch,) = export.symbolic_shape("batch", scope=scope)

    def type_of(leaf: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            leaf = jax.eval_shape(jnp.asarray, leaf)
        shape = tuple(leaf.shape)
        if is_polymorphic and shape:
            shape = (batch, *shape[1:])
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(type_of, args)


def _find_scope(args: tuple[PyTree, ...]) -> export.SymbolicScope | None:
    """Returns the scope of the symbolic sizes in some arguments, if there are any."""
    for leaf in jax.tree.leaves(args):
        for size in getattr(leaf, "shape", ()):
            if export.is_symbolic_dim(size):
                return size.scope
    return None
