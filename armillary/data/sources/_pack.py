"""Packing: documents of several lengths as examples of one length, by a plan."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from armillary._checks import check_one_of, check_positive_int
from armillary.data.sources._arrays import fingerprint_all
from armillary.data.sources._batch import as_numpy
from armillary.data.sources._examples import ExampleReader, Examples, as_vector
from armillary.data.sources._packing_plan import find_dtype, make_plan

_TOKENS = "tokens"
_TARGETS = "targets"
_SEGMENTS = "segment_ids"
_POSITIONS = "positions"
_LONGEST = np.iinfo(np.int32).max  # because positions have 32 bits on a device
_AT_ONCE = 1024
"""The number of documents that are read together to find their lengths."""
_BLOCK = 2**20
"""The numbers of a plan that are converted together."""


def pack(
    documents: Any,
    *,
    row_length: int,
    lengths: Any = None,
    window: int | None = None,
    targets: bool = False,
) -> "PackedExamples":
    """Returns examples of one length, each with the tokens of several documents.

    The plan depends only on the lengths of the documents. So an example is found
    without reading the documents of other examples, and every process makes the same
    examples. Each token is in exactly one example. Documents longer than a row are cut.
    The longest documents come first, so shuffle the examples (`shuffle_seed`).

    An example is a dictionary of arrays of shape `(row_length, ...)`:

    - `tokens`, or the names of the document's own arrays;
    - `segment_ids`: 1 for the tokens of the first document, 2 for the second, and 0 for
      padding. Attention is correct if it keeps different numbers apart.
    - `positions`: the place of each token in its piece of a document, from 0;
    - `targets`, if requested: the next token. At the end of a cut piece, it is the
      first token of the next piece, so no target is lost.

    Args:
        documents: Documents by number, such as a list, a `datasets.Dataset` or a
            result of `select`: each one is an array of tokens, of shape
            `(length, ...)`, or a dictionary of arrays with one first size.
        row_length: The number of tokens in an example.
        lengths: The number of tokens of each document, as an array. By default, each
            document is read once to find it.
        window: The number of neighboring documents that may share examples. By
            default, all documents may, which leaves the least padding. A window keeps
            the documents of an example near each other, for data on slow disks.
        targets: Whether an example has `targets`. The last token of a document is then
            only a target, so a document of n tokens takes n - 1 places. Other arrays
            stay with their token. For the weight of a target, which is the next token,
            shift the array in the document: `np.append(weights[1:], 0)`.

    Returns:
        Examples by number, for `from_random_access`, `mix` or `select`. `efficiency` is
        the share of the places that hold tokens.

    Raises:
        TypeError: If `documents` has no examples by number, or a document is not an
            array or a dictionary of arrays.
        ValueError: If no document has a token, lengths are wrong, or the arrays of a
            document differ in size or have a name that `pack` uses.
    """
    return PackedExamples(documents, row_length, lengths, window, targets)


class PackedExamples(Examples):
    """Rows of tokens; made by `pack`, which documents it.

    Attributes:
        row_length: The number of places in a row.
        num_tokens: The places of all rows that hold a token.
    """

    def __init__(
        self, documents: Any, row_length: int, lengths: Any, window: Any, targets: bool
    ) -> None:
        self.row_length = check_positive_int("row_length", row_length, _LONGEST)
        if window is not None:
            window = check_positive_int("window", window)
        check_one_of("targets", targets, (True, False))
        self._has_targets = bool(targets)
        self._reader = ExampleReader(documents, "documents")
        if lengths is None:
            self._lengths = self._read_lengths()
        else:
            self._lengths = _check_lengths(lengths, self._reader.num_examples)

        longest = int(self._lengths.max(initial=0))
        self._lengths = self._lengths.astype(find_dtype(longest))
        used = np.maximum(self._lengths - self._has_targets, 0)
        self.num_tokens = int(used.sum())
        if not self.num_tokens:
            least = 1 + self._has_targets
            raise ValueError(
                f"`documents` has {len(used)} documents, of which none has {least} or "
                "more tokens, so there is nothing to pack. Pass at least one document."
            )
        self._plan = make_plan(used, self.row_length, window)
        self._types = self._read_types(int(np.argmax(used > 0)))

    def __len__(self) -> int:
        return self._plan.num_rows

    def __repr__(self) -> str:
        return (
            f"PackedExamples({len(self):,} rows of {self.row_length:,} places, "
            f"{self.efficiency:.1%} filled)"
        )

    @property
    def efficiency(self) -> float:
        """The share of the places that hold a token, from 0 to 1."""
        return self.num_tokens / (len(self) * self.row_length)

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, np.ndarray]]:
        bounds = self._plan.bounds
        pieces = [range(bounds[number], bounds[number + 1]) for number in numbers]
        # Each document once, because a long document has pieces in several rows.
        wanted = {int(self._plan.documents[piece]) for row in pieces for piece in row}
        documents = self._read(sorted(wanted))
        return [self._make_row(row, documents) for row in pieces]

    def fingerprints(self) -> dict[str, str]:
        plan = self._plan
        source = repr(self._reader.fingerprints()).encode()
        parts = (plan.bounds, plan.documents, plan.starts, plan.sizes)
        blocks = itertools.chain.from_iterable(map(_as_blocks, parts))
        text = fingerprint_all(itertools.chain(blocks, [source]))
        return {"packing": f"{len(self)} rows of {self.row_length} {text}"}

    def _make_row(
        self, pieces: range, documents: Mapping[int, Mapping[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        row = {
            name: np.zeros((self.row_length, *shape), dtype)
            for name, (shape, dtype) in self._types.items()
        }
        if self._has_targets:
            row[_TARGETS] = np.zeros_like(row[_TOKENS])
        row[_SEGMENTS] = np.zeros(self.row_length, np.int32)
        row[_POSITIONS] = np.zeros(self.row_length, np.int32)

        place = 0
        for segment, piece in enumerate(pieces, start=1):
            size = int(self._plan.sizes[piece])
            start = int(self._plan.starts[piece])
            document = documents[int(self._plan.documents[piece])]
            own = slice(place, place + size)
            for name, array in document.items():
                row[name][own] = array[start : start + size]
            if self._has_targets:
                row[_TARGETS][own] = document[_TOKENS][start + 1 : start + size + 1]
            row[_SEGMENTS][own] = segment
            row[_POSITIONS][own] = np.arange(size)
            place += size
        return row

    def _read(self, numbers: Sequence[int]) -> dict[int, dict[str, np.ndarray]]:
        """Returns documents by number, with the lengths and types of the plan."""
        found: dict[int, dict[str, np.ndarray]] = {}
        for number, value in zip(numbers, self._reader.read(numbers), strict=True):
            document = _as_document(value, number)
            length = _find_length(document, number)
            planned = self._lengths[number]
            if length != planned:
                raise ValueError(
                    f"Document {number} of `documents` has {length} tokens, but it had "
                    f"{planned} when the plan was made. A document must always have "
                    "the length in `lengths`, and the length of its first read."
                )
            types = _find_types(document)
            if types != self._types:
                raise TypeError(
                    f"Document {number} of `documents` has {_describe(types)}, but "
                    f"other documents have {_describe(self._types)}. Give all "
                    "documents the same names, shapes and dtypes, as in "
                    "`np.asarray(tokens, np.int32)`."
                )
            found[number] = document
        return found

    def _read_lengths(self) -> np.ndarray:
        count = self._reader.num_examples
        lengths = np.empty(count, np.int64)
        for start in range(0, count, _AT_ONCE):
            numbers = range(start, min(start + _AT_ONCE, count))
            values = self._reader.read(numbers)
            for number, value in zip(numbers, values, strict=True):
                document = _as_document(value, number)
                lengths[number] = _find_length(document, number)
        return lengths

    def _read_types(self, number: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Returns the types of a token of the first document that is used."""
        document = _as_document(self._reader.read([number])[0], number)
        reserved = {_SEGMENTS, _POSITIONS, _TARGETS} & set(document)
        if reserved:
            raise ValueError(
                f"Document {number} of `documents` has an array "
                f"`{sorted(reserved)[0]}`, a name that `pack` gives to an array of its "
                "own. Rename it."
            )
        if self._has_targets and _TOKENS not in document:
            raise ValueError(
                f"`targets` is True, but document {number} of `documents` has no array "
                f"`{_TOKENS}`, only {', '.join(document)}. Rename the array of tokens."
            )
        return _find_types(document)


def _as_blocks(numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yields parts of an array in 64 bits, so that its type makes no difference."""
    for start in range(0, len(numbers), _BLOCK):
        yield numbers[start : start + _BLOCK].astype(np.int64)


def _as_document(value: Any, number: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a document by name."""
    arrays = value if isinstance(value, Mapping) else {_TOKENS: value}
    masked = [name for name, leaf in arrays.items() if np.ma.is_masked(leaf)]
    if masked:
        raise TypeError(
            f"Document {number} of `documents` has masked values in `{masked[0]}`, but "
            "every token must have a value. Fill them in, as in `tokens.filled(0)`."
        )
    try:
        found = {name: np.asarray(as_numpy(leaf)) for name, leaf in arrays.items()}
    except ValueError:  # Lists of several lengths.
        found = {}
    is_right = all(leaf.ndim and leaf.dtype.kind in "biuf" for leaf in found.values())
    if not found or not is_right:
        raise TypeError(
            f"Document {number} of `documents` is {value!r:.80} of type "
            f"{type(value).__name__}, but it must be an array of tokens, or a "
            "dictionary of arrays. Text becomes tokens by a tokenizer, or by "
            "`np.frombuffer(text.encode(), np.uint8)`."
        )
    return found


def _find_length(document: Mapping[str, np.ndarray], number: int) -> int:
    sizes = {name: len(array) for name, array in document.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"Document {number} of `documents` has arrays of different lengths: "
            f"{sizes}. All arrays of a document must have one entry for each token."
        )
    return next(iter(sizes.values()))


def _find_types(
    document: Mapping[str, np.ndarray],
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (leaf.shape[1:], leaf.dtype) for name, leaf in document.items()}


def _describe(types: Mapping[str, tuple[tuple[int, ...], np.dtype]]) -> str:
    parts = [f"{name}: {dtype} {shape}" for name, (shape, dtype) in types.items()]
    return ", ".join(parts)


def _check_lengths(lengths: Any, count: int) -> np.ndarray:
    array = as_vector(lengths)
    is_whole = array is not None and array.dtype.kind in "iu"
    if array is None or not is_whole or array.min(initial=0) < 0:
        raise ValueError(
            f"`lengths` is {lengths!r:.80}, but it must be a list of whole numbers "
            "that are not negative: the number of tokens of each document."
        )
    if len(array) != count:
        raise ValueError(
            f"`lengths` has {len(array)} entries, but `documents` has {count} "
            "documents. Pass one length for each document."
        )
    return array.astype(np.int64)
