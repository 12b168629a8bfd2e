"""TFRecord files of `tf.train.Example` as a source, without TensorFlow."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from armillary._checks import check_path
from armillary.data.sources._example import ExampleParser, FixedLenFeature
from armillary.data.sources._indexed import IndexedDataset, fingerprint
from armillary.data.sources._record_files import RecordFiles
from armillary.typing import Batch

_MOST_READ = 64
"""How many records a fingerprint reads."""

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


def from_tfrecords(
    paths: Paths,
    features: Mapping[str, FixedLenFeature],
    *,
    batch_size: int,
    shuffle_seed: int | None = None,
    repeat: bool = False,
    drop_remainder: bool = False,
) -> "TFRecordDataset":
    """Returns a data set of the records of TFRecord files, in batches.

    The files are one sequence of records, in the order of the paths, and are shuffled
    as one. Each file is gone through once to find its records, which are then read one
    by one, with their checksums compared. A batch is a dictionary of NumPy arrays::

        data = armillary.data.from_tfrecords(
            sorted(glob.glob("data/train-*.tfrecord")),
            {
                "image": armillary.data.FixedLenFeature((28, 28), np.uint8),
                "label": armillary.data.FixedLenFeature((), np.int32),
            },
            batch_size=64,
            shuffle_seed=0,
        )

    Args:
        paths: One file or several, not compressed, on a file system of this machine.
        features: What to read of each record, by name; the rest is left out.
        batch_size: As in `from_arrays`, like all that follow.
        shuffle_seed: Seed of the order.
        repeat: Whether the data set never ends.
        drop_remainder: Whether to leave out a last batch that is not full.

    Returns:
        A data set. Each pass over it is the next epoch. Positions count examples, so
        that one can be restored with another batch size.

    Raises:
        FileNotFoundError: If there is no such file.
        TypeError: If `features` is no dictionary of `FixedLenFeature`.
        ValueError: If there is no path, no feature or no record, or another argument
            is wrong.
        TFRecordError: If a file is damaged, or records do not hold the features.
        BatchSizeError: If `drop_remainder` leaves no batch.
    """
    return TFRecordDataset(
        _check_paths(paths),
        features,
        batch_size=batch_size,
        shuffle_seed=shuffle_seed,
        repeat=repeat,
        drop_remainder=drop_remainder,
    )


class TFRecordDataset(IndexedDataset):
    """Records of files in batches; made by `from_tfrecords`, which documents it."""

    name = "TFRecord files"

    def __init__(
        self,
        paths: list[str],
        features: Mapping[str, FixedLenFeature],
        **options: Any,
    ) -> None:
        self._parser = ExampleParser(_check_features(features))
        self._files = RecordFiles(paths)
        if not len(self._files):
            raise ValueError(
                f"`paths` is {_show(paths)}, which hold 0 records, but a data set "
                "needs at least one. Pass files with records."
            )
        super().__init__(len(self._files), **options)
        # What is wrong with `features` shows here, and not in the middle of a program.
        self.read_rows(np.zeros(1, np.int64))

    def read_rows(self, rows: np.ndarray) -> Batch:
        """Returns the features of these records.

        Raises:
            TFRecordError: If a record is damaged or does not hold the features.
        """
        records = self._files.read(rows)
        return self._parser.parse(records, lambda place: self._files.name(rows[place]))

    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of the sizes of all records, and of what some hold."""
        some = self._files.read(self.spaced_rows(_MOST_READ))
        return {"records": fingerprint(self._files.sizes, *some)}


def _check_paths(paths: Paths) -> list[str]:
    if isinstance(paths, str | os.PathLike) or not np.iterable(paths):
        paths = [paths]
    found = [check_path("paths", path) for path in paths]
    if not found:
        raise ValueError(
            f"`paths` is {paths!r}, but there must be at least one file. Look at the "
            "pattern that should have found them."
        )
    missing = [path for path in found if not os.path.isfile(path)]
    if missing:
        raise FileNotFoundError(
            f"`paths` has {_show(missing)}, which is no file. Pass files of this "
            "machine; patterns are not expanded: `sorted(glob.glob(pattern))`."
        )
    return found


def _check_features(
    features: Mapping[str, FixedLenFeature],
) -> dict[str, FixedLenFeature]:
    is_mapping = isinstance(features, Mapping)
    if not is_mapping or not all(
        isinstance(feature, FixedLenFeature) for feature in features.values()
    ):
        raise TypeError(
            f"`features` is {features!r:.200}, but it must be a dictionary of "
            "`armillary.data.FixedLenFeature`. Use `features={'label': "
            "armillary.data.FixedLenFeature((), np.int64)}`."
        )
    if not features:
        raise ValueError(
            "`features` is {}, but a batch needs at least one array. Name the features "
            "to read."
        )
    return dict(features)


def _show(paths: list[str]) -> str:
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"`{paths[0]}`{more}"
