"""Exports a model to numbered folders of safetensors."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from armillary._checks import (
    check_instance,
    check_methods,
    check_path,
    check_positive_int,
)
from armillary._logging import logger
from armillary.checkpoint._writer import agree_on
from armillary.cluster._join import get_peers
from armillary.errors import CheckpointError
from armillary.pretrained._names import Names
from armillary.pretrained._save import MAX_FILE_BYTES, as_float_dtype, save
from armillary.typing import Output


class ExportSafetensors:
    """Writes a model in safetensors, which `transformers` and other libraries read.

    Each call writes one folder, by `armillary.pretrained.save`. To load it, the code of
    the model and Armillary are not needed. `docs/train/pretrained.md` has an example.

    A folder is complete as soon as it has `model.safetensors`, or the index of several
    files, which is written last. Training is not disturbed. In a job of several
    processes, the processes share the files.

    Args:
        model: The model, as for `armillary.pretrained.save`.
        names: The table of names, an `armillary.pretrained.Names`.
        file_manager: Names the folders and removes old ones, such as an
            `ExportFileManager`.
        max_file_bytes: The most bytes of tensors in one file.
        dtype: The dtype for all floats of at least 16 bits in the files, such as
            `"bfloat16"`. By default, their own.
        copy: Files to copy into each folder, such as the `config.json` of the
            pretrained model.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `max_file_bytes` is not positive, `dtype` is not a dtype of
            floats, or two files of `copy` have one name.
    """

    def __init__(
        self,
        model: Any,
        names: Names,
        file_manager: Any,
        *,
        max_file_bytes: int = MAX_FILE_BYTES,
        dtype: Any = None,
        copy: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        fix = "Use the table of `armillary.pretrained.load`."
        check_instance("names", names, Names, fix)
        fix = 'Use `armillary.actions.ExportFileManager("runs/llama/export")`.'
        check_methods("file_manager", file_manager, ("next_name", "clean_up"), fix)
        check_positive_int("max_file_bytes", max_file_bytes)
        as_float_dtype("dtype", dtype)
        check_instance("copy", copy, list | tuple, 'Use `copy=["llama/config.json"]`.')
        self.model = model
        self.names = names
        self.file_manager = file_manager
        self._max_file_bytes = max_file_bytes
        self._dtype = dtype
        self._copy = [Path(check_path("copy", path)) for path in copy]
        names_of_files = [path.name for path in self._copy]
        for name in names_of_files:
            if names_of_files.count(name) > 1:
                raise ValueError(
                    f"`copy` has two files with the name {name!r}, but they go into "
                    "one folder. Remove one of them."
                )

    def __call__(self, output: Output = None) -> None:
        """Exports the model as it is now. All processes must call it.

        Raises:
            CheckpointMismatchError: If the table does not name all arrays of the model.
            CheckpointError: If a file cannot be written. Earlier folders are not
                changed.
        """
        del output
        peers = get_peers()
        # Only the first process knows which folders there are.
        folder = agree_on("the name of an export", self._begin, peers)
        save(
            self.model,
            folder,
            self.names,
            max_file_bytes=self._max_file_bytes,
            dtype=self._dtype,
        )
        agree_on("the end of an export", self.file_manager.clean_up, peers)
        if peers.index == 0:
            logger.info("exported the model to %s.", folder)

    def _begin(self) -> str:
        """Returns the next folder, with the copied files."""
        folder = Path(self.file_manager.next_name())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path in self._copy:
                shutil.copy(path, folder / path.name)
        except OSError as error:
            raise CheckpointError(
                f"`ExportSafetensors` cannot copy its files to {str(folder)!r}: "
                f"{error}. Use files that exist, and a folder that this process may "
                "write."
            ) from error
        return str(folder)
