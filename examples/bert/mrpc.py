"""The Microsoft Research Paraphrase Corpus: pairs of sentences, as WordPieces.

The features have the names that BERT's own `create_finetuning_data.py` gives them.
"""

import csv
from pathlib import Path

import numpy as np
from tokenizers import BertWordPieceTokenizer

COLUMNS = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]


def read_pairs(path: Path) -> tuple[list[tuple[str, str]], np.ndarray]:
    """Returns the pairs of a file, and 1 for each pair with one meaning, else 0."""
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing. The folder needs `msr_paraphrase_train.txt` and "
            "`msr_paraphrase_test.txt`."
        )
    # Quotes are part of the sentences.
    with path.open(encoding="utf-8-sig", newline="") as file:
        header, *rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    if header != COLUMNS:
        raise ValueError(
            f"{path} begins with the columns {header}, but a file of the corpus begins "
            f"with {COLUMNS}. Is it another file?"
        )
    for number, row in enumerate(rows, start=2):
        if len(row) != len(COLUMNS) or row[0] not in ("0", "1"):
            raise ValueError(
                f"Line {number} of {path} is {row}, but a line has {len(COLUMNS)} "
                "fields, the first of which is 0 or 1. Download the file again."
            )
    labels = np.array([int(row[0]) for row in rows], np.int32)
    return [(row[3], row[4]) for row in rows], labels


def encode_pairs(
    pairs: list[tuple[str, str]], vocabulary: Path, max_length: int
) -> dict[str, np.ndarray]:
    """Returns `[CLS] a [SEP] b [SEP]` for each pair, padded to `max_length` tokens.

    If a pair is too long, the longer sentence loses tokens first.

    Args:
        pairs: The sentences.
        vocabulary: File with one WordPiece in a line, of an uncased model.
        max_length: Tokens of each pair.
    """
    if not vocabulary.is_file():
        raise FileNotFoundError(
            f"{vocabulary} is missing. It is the file `vocab.txt` that comes with an "
            "uncased BERT."
        )
    tokenizer = BertWordPieceTokenizer(str(vocabulary), lowercase=True)
    tokenizer.enable_truncation(max_length)
    tokenizer.enable_padding(length=max_length)
    encodings = tokenizer.encode_batch(pairs)
    return {
        "input_ids": np.array([e.ids for e in encodings], np.int32),
        "input_mask": np.array([e.attention_mask for e in encodings], np.int32),
        "segment_ids": np.array([e.type_ids for e in encodings], np.int32),
    }


def read_split(
    folder: Path, split: str, vocabulary: Path, max_length: int
) -> dict[str, np.ndarray]:
    """Returns the features and `label_ids` of the pairs in `"train"` or `"test"`."""
    pairs, labels = read_pairs(folder / f"msr_paraphrase_{split}.txt")
    return {**encode_pairs(pairs, vocabulary, max_length), "label_ids": labels}
