"""Reads many `tf.train.Example` messages together, without a parser.

A message is a sequence of fields. Each field has a tag, a length and its content, so
NumPy can read one field of all messages at once. The few messages that are not plain
are left for the parser (`_message.py`).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from armillary.data.sources._features import (
    DTYPES_BY_LIST,
    FixedLenFeature,
    convert,
    list_for,
)

_LISTS = ["", *DTYPES_BY_LIST]
"""The lists by the number of their field."""
# Tags: the number of a field, and a flag that a length follows.
_FIRST = 1 << 3 | 2
_SECOND = 2 << 3 | 2
_THIRD = 3 << 3 | 2
_TOO_LONG = 2**62
# With fewer messages, reading them one by one is faster.
_FEW_ROWS = 16


def parse_examples(
    data: bytes,
    begins: np.ndarray,
    ends: np.ndarray,
    features: Mapping[str, FixedLenFeature],
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns a batch of messages, and the rows that `read_values` must read.

    These are messages that are not plain (packed values, one kind of list), messages
    that do not fit `features`, and small batches. `data` has 8 additional bytes after
    the last message.
    """
    count = len(begins)
    batch: dict[str, np.ndarray] = {}
    for name, feature in features.items():
        batch[name] = np.empty((count, *feature.shape), feature.dtype)
    if count < _FEW_ROWS:
        return batch, np.arange(count)

    is_read, lists = _find_lists(data, begins, ends, [*features])
    for name, (kinds, all_begins, all_ends) in zip(features, lists, strict=True):
        feature = features[name]
        # A kind of 0 is a message without the feature.
        is_known = (kinds == 0) & (feature.default_value is not None)
        if is_known.any():
            batch[name][is_known, ...] = feature.default_value

        # Any array may be stored as bytes.
        own_kind = _LISTS.index(list_for(feature.dtype) or "")
        for kind in {1, own_kind}:
            rows = np.flatnonzero(is_read & (kinds == kind))
            if not len(rows):
                continue
            fits, values = _take_values(
                data, kind, all_begins[rows], all_ends[rows], feature
            )
            fitting = rows[fits]
            batch[name][fitting] = values.reshape(-1, *feature.shape)
            is_known[fitting] = True
        is_read &= is_known
    return batch, np.flatnonzero(~is_read)


class _Entries(NamedTuple):
    """One entry of the map of features in each of many messages.

    Attributes:
        is_plain: Whether an entry has a name and one list of packed values.
        key_begin: The begin of its name.
        key_end: The end of its name.
        kind: The number of the field of its list.
        begin: The begin of its packed values.
        stop: The end of the entry, where its values end, too.
    """

    is_plain: np.ndarray
    key_begin: np.ndarray
    key_end: np.ndarray
    kind: np.ndarray
    begin: np.ndarray
    stop: np.ndarray


class _Fields:
    """Reads one field of many messages together."""

    def __init__(self, data: bytes) -> None:
        self._words = np.ndarray(len(data) - 7, "<u8", data, strides=(1,))

    def read(self, at: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        """Returns the tags of fields, and the begin and end of their contents."""
        words = self._words
        last = len(words) - 1
        word: Any = words[np.minimum(at, last)]

        first = int(word[0])
        mask, _, _ = _split(first)
        differs = (word ^ word[0]) & mask
        if not differs.any():
            word = first  # The usual case: all are equal.

        mask, size, length = _split(word)
        tag = word & 0xFF
        begin = at + size
        # A length of more than 4 bytes moves the end behind all data, so nothing fits.
        end = begin + np.int64(length) + np.int64(mask == 0) * _TOO_LONG
        return tag, begin, end

    def read_entries(self, at: np.ndarray, ends: np.ndarray) -> _Entries:
        """Returns the entries that begin at these places, in messages with these ends.

        An entry holds a key and a feature. The feature holds a list, and the list holds
        packed values. Each of them must end where the entry ends.
        """
        tag, inside, stop = self.read(at)
        is_entry = (tag == _FIRST) & (stop <= ends)

        tag, key_begin, key_end = self.read(inside)
        is_key = (tag == _FIRST) & (key_begin < key_end) & (key_end <= stop)

        tag, inside, end = self.read(key_end)
        is_feature = (tag == _SECOND) & (end == stop)

        # The number of the field is the kind of the list.
        tag_of_list, inside, end = self.read(inside)
        has_length = tag_of_list & 7 == 2
        is_known = (tag_of_list >= _FIRST) & (tag_of_list <= _THIRD)
        is_list = has_length & is_known & (end == stop)

        tag, begin, end = self.read(inside)
        is_packed = (tag == _FIRST) & (end == stop)
        return _Entries(
            is_plain=is_entry & is_key & is_feature & is_list & is_packed,
            key_begin=key_begin,
            key_end=key_end,
            kind=np.broadcast_to(tag_of_list >> 3, at.shape),
            begin=begin,
            stop=stop,
        )


def _find_lists(
    data: bytes,
    begins: np.ndarray,
    ends: np.ndarray,
    names: list[str],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether messages are plain, and kind, begin and end of their lists."""
    fields = _Fields(data)
    places = {name.encode(): place for place, name in enumerate(names)}
    # For each name: the kinds of all messages, the begins, and the ends.
    lists = np.zeros((len(names), 3, len(begins)), np.int64)

    # The message holds a map of features.
    tag, at, end = fields.read(begins)
    is_plain = (tag == _FIRST) & (end == ends)
    # Each round reads the next entry of each message that has one.
    while len(rows := np.flatnonzero(is_plain & (at < ends))):
        entries = fields.read_entries(at[rows], ends[rows])
        is_plain[rows] = entries.is_plain
        at[rows] = entries.stop

        left = np.flatnonzero(entries.is_plain)
        while len(left):  # Once for each name that comes at this place.
            first = left[0]
            name = data[entries.key_begin[first] : entries.key_end[first]]
            has_name = _have_name(data, entries, left, name)
            same = left[has_name]
            left = left[~has_name]
            found = rows[same]
            place = places.get(name)
            if place is not None:
                # A message with the same feature twice is not plain.
                is_plain[found] &= lists[place, 0, found] == 0
                lists[place][0, found] = entries.kind[same]
                lists[place][1, found] = entries.begin[same]
                lists[place][2, found] = entries.stop[same]
            elif name.decode(errors="ignore").encode() != name:
                # Not a text of UTF-8, which the parser refuses.
                is_plain[found] = False
    return is_plain, lists


def _have_name(
    data: bytes,
    entries: _Entries,
    indices: np.ndarray,
    name: bytes,
) -> np.ndarray:
    """Returns which of some entries have a name."""
    size = len(name)
    begins = entries.key_begin[indices]
    is_same = entries.key_end[indices] - begins == size

    # All texts of this size in the data, one at each byte; nothing is copied.
    num_texts = len(data) - size + 1
    texts = np.ndarray(num_texts, f"S{size}", data, strides=(1,))
    is_same[is_same] = texts[begins[is_same]] == name
    return is_same


def _split(word: Any) -> tuple[Any, Any, Any]:
    """Returns the parts of words that begin with a tag of one byte and a length.

    They are a mask of tag and length, which is 0 if the length has more than 4 bytes;
    the number of their bytes; and the length.
    """
    bits = word >> 8 & 0xFFFFFFFF
    # The last byte of a varint is the first one whose top bit is 0.
    top = ~bits & 0x80808080
    top &= ~top + 1
    bits &= top - 1
    # Each byte has 7 bits of the number.
    length = bits & 0x7F
    length |= bits >> 1 & 0x3F80
    length |= bits >> 2 & 0x1FC000
    length |= bits >> 3 & 0xFE00000
    size = 2 + (top > 0x80) + (top > 0x8000) + (top > 0x800000)
    mask = (top << 9) - (top > 0)
    return mask, size, length


def _take_values(
    data: bytes,
    kind: int,
    begin: np.ndarray,
    end: np.ndarray,
    feature: FixedLenFeature,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether lists fit the feature, and the values of the lists that fit."""
    dtype = feature.dtype
    count = math.prod(feature.shape)
    if kind == 1 and dtype.kind == "O":
        return _take_texts(data, begin, end, count)

    # A varint of one byte is its value.
    by_kind = {1: dtype.newbyteorder("<"), 2: "<f4", 3: "u1"}
    stored = np.dtype(by_kind[kind])
    size = count * stored.itemsize
    fits = end - begin == size

    # All runs of this size in the data, one at each byte; nothing is copied.
    num_runs = max(0, len(data) - size)
    runs = np.ndarray(num_runs, f"V{size}", data, strides=(1,))
    written = runs[begin[fits]].view(stored).reshape(-1, count)
    if kind == 3:
        are_small = fits.all() and (written < 0x80).all()
        if not are_small:
            fits, written = _take_integers(data, begin, end, count)

    if kind == 1:
        return fits, written.astype(dtype, copy=False)
    # A number may be too large for the dtype.
    read, fit = convert(written, dtype)
    is_fine = fit.all(1)
    if not is_fine.all():
        fits[np.flatnonzero(fits)[~is_fine]] = False
        read = read[is_fine]
    return fits, read


def _take_texts(
    data: bytes,
    begin: np.ndarray,
    end: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether a feature of `count` texts fits the lists, and their texts."""
    # A list is plain only if it holds a single text.
    fits = np.full(len(begin), count == 1)
    begins = begin[fits].tolist()
    ends = end[fits].tolist()
    texts = [data[start:stop] for start, stop in zip(begins, ends, strict=True)]
    return fits, np.fromiter(texts, object, len(texts))


def _take_integers(
    data: bytes,
    begin: np.ndarray,
    end: np.ndarray,
    count: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns whether lists hold `count` varints, and the values of those lists."""
    # A varint has 1 to 10 bytes.
    sizes = end - begin
    fits = (sizes >= count) & (sizes <= 10 * count)
    begin = begin[fits]
    sizes = sizes[fits]

    # The bytes of all lists, one list after the other.
    stops = np.cumsum(sizes)
    starts = stops - sizes
    at = np.arange(sizes.sum()) + np.repeat(begin - starts, sizes)
    octets = np.frombuffer(data, np.uint8)[at]
    is_fine = octets[stops - 1] < 0x80
    octets[stops - 1] &= 0x7F  # No value continues in the next list.

    # The last byte of each value, the number of its bytes, and its list.
    num_lists = len(begin)
    last = np.flatnonzero(octets < 0x80)
    lengths = np.diff(last, prepend=-1)
    owner = np.repeat(np.arange(num_lists), sizes)[last]
    too_long = lengths > 10
    is_fine[owner[too_long]] = False
    is_fine &= np.bincount(owner, minlength=num_lists) == count

    is_used = is_fine[owner]
    last = last[is_used]
    lengths = lengths[is_used]
    values = np.zeros(len(last), np.uint64)
    # The first byte has the lowest 7 bits of a value.
    first = last - lengths + 1
    for place in range(lengths.max(initial=0)):
        longer = np.flatnonzero(lengths > place)
        bits = octets[first[longer] + place] & np.uint64(0x7F)
        values[longer] |= bits << np.uint64(7 * place)
    fits[fits] = is_fine
    return fits, values.view(np.int64).reshape(-1, count)
