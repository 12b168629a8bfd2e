"""Pairs as WordPieces in TFRecord files, as `create_finetuning_data.py` writes them."""

from pathlib import Path
from typing import Any

import numpy as np

from armillary.data import FixedLenFeature, TFRecordDataset, from_tfrecords

# Two features have other names in some programs.
OTHER_NAMES = {"input_ids": "input_word_ids", "segment_ids": "input_type_ids"}


def open_records(
    folder: Path, split: str, *, max_length: int, **options: Any
) -> TFRecordDataset:
    """Returns the pairs of all files with `split` in their names.

    Args:
        folder: Where files such as `MRPC_train.tf_record` are.
        split: The part of the file names that selects the split: `"train"` or `"eval"`.
        max_length: Tokens of each pair, the same number as in the files.
        **options: Arguments of `armillary.data.from_tfrecords`.

    Returns:
        A dataset of the features that `bert.mrpc` makes, under the names of the files.

    Raises:
        FileNotFoundError: If there is no such file.
        TFRecordError: If a file is damaged, or holds something else.
    """
    paths = sorted(folder.glob(f"*{split}*.tf*record*"))
    if not paths:
        raise FileNotFoundError(
            f"{folder} has no file such as MRPC_{split}.tf_record. The folder needs "
            "files with `train` and with `eval` in their names."
        )
    tokens = FixedLenFeature((max_length,), np.int32)
    names = ["input_ids", "input_mask", "segment_ids"]
    optional = FixedLenFeature((max_length,), np.int32, default_value=-1)
    other = OTHER_NAMES["input_ids"]
    record = next(iter(from_tfrecords(paths[0], {other: optional}, batch_size=1)))
    if record[other].min() >= 0:
        names = [OTHER_NAMES.get(name, name) for name in names]
    features = dict.fromkeys(names, tokens)
    features["label_ids"] = FixedLenFeature((), np.int32)
    return from_tfrecords(paths, features, **options)
