"""States of Python objects, as JSON and arrays that a checkpoint can hold.

Values that JSON can hold stay unchanged. Everything else becomes a dictionary with a
reserved key, so that a state is restored with its types::

    {"ring": ring, "place": (3, 4)}  ->  {"ring": {MARK: "array", "name": ...},
                                          "place": {MARK: "tuple", "items": [3, 4]}}
"""

import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

MARK = "__armillary__"
_MAX_INLINE_BYTES = 1024
"""Arrays up to this size are stored as text, because a file for each is slow."""


class Packed(NamedTuple):
    """A state as JSON, and the arrays that it names.

    `has_arrays` is true if the state has any NumPy arrays or numbers, even small ones.
    """

    state: Any
    arrays: dict[str, np.ndarray]
    has_arrays: bool

    def unpack(self) -> Any:
        """Returns the original state, with copies of its arrays."""
        copies = {name: array.copy() for name, array in self.arrays.items()}
        return unpack(self.state, copies)

    def fingerprint(self) -> str:
        """Returns a short text, equal for equal states."""
        text = json.dumps(self.state)
        digest = hashlib.blake2b(text.encode(), digest_size=16)
        for array in self.arrays.values():
            digest.update(array.reshape(-1).view(np.uint8).data)
        return digest.hexdigest()


def read_state(name: str, value: Any) -> Packed:
    """Returns a copy of an object's state, which may change during a write.

    Args:
        name: The name of the object in the checkpoint.
        value: An object with `get_state`.
    """

    def describe() -> str:
        return f"`get_state` of `{name}`, of type {type(value).__name__},"

    return pack(name, value.get_state(), describe)


def pack(name: str, value: Any, describe: Callable[[], str]) -> Packed:
    """Returns a copy of a state, in parts that a checkpoint can hold.

    Args:
        name: The name of the object in the checkpoint. Names of arrays begin with it.
        value: The state.
        describe: Returns the origin of the state, for messages.
    """
    packer = _Packer(name, describe)
    try:
        state = packer.pack_value(value, "")
    except RecursionError:
        raise TypeError(
            f"{describe()} returned a state that holds itself, which a checkpoint "
            "cannot hold. Return copies of its parts."
        ) from None
    return Packed(state, packer.arrays, packer.has_arrays)


class _Packer:
    """Packs the parts of one state.

    Attributes:
        arrays: The arrays that are too large to be text, by name.
        has_arrays: Whether the state has any arrays or numbers of NumPy.
    """

    def __init__(self, name: str, describe: Callable[[], str]) -> None:
        self._name = name
        self._describe = describe
        self.arrays: dict[str, np.ndarray] = {}
        self.has_arrays = False

    def pack_value(self, part: Any, path: str) -> Any:
        match part:
            case np.ndarray():
                return self._pack_array(part, path, "array")
            case np.generic():
                return self._pack_array(np.asarray(part), path, "scalar")
            case None | bool() | int() | float() | str():
                return part
            case bytes():
                return {MARK: "bytes", "data": _as_text(part)}
            case list():
                return self._pack_items(part, path)
            case tuple():
                return {MARK: "tuple", "items": self._pack_items(part, path)}
            case dict():
                return self._pack_dictionary(part, path)
        raise self._refuse(part, path)

    def _pack_items(self, items: Any, path: str) -> list[Any]:
        return [self.pack_value(part, _join(path, i)) for i, part in enumerate(items)]

    def _pack_dictionary(self, held: Mapping[Any, Any], path: str) -> dict[str, Any]:
        parts: list[Any] = []
        for key, part in held.items():
            parts.append(self.pack_value(part, _join(path, key)))

        is_json = all(type(key) is str for key in held)
        if is_json and MARK not in held:
            return dict(zip(held, parts, strict=True))
        keys = [self.pack_value(key, path) for key in held]
        return {MARK: "dictionary", "keys": keys, "values": parts}

    def _pack_array(self, array: np.ndarray, path: str, kind: str) -> dict[str, Any]:
        self.has_arrays = True
        if isinstance(array, np.ma.MaskedArray) or not is_storable(array.dtype):
            raise self._refuse(array, path)
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
        marked = {MARK: kind, "dtype": array.dtype.name, "shape": list(array.shape)}
        if array.nbytes <= _MAX_INLINE_BYTES:
            return {**marked, "data": _as_text(array.tobytes())}

        # Named by number, because two keys may be equal as text. A keyword has no dot.
        full_name = f"{self._name}.state/{len(self.arrays)}"
        self.arrays[full_name] = array
        return {**marked, "name": full_name}

    def _refuse(self, part: Any, path: str) -> TypeError:
        place = f" at `{path}`" if path else ""
        kind = type(part).__name__
        return TypeError(
            f"{self._describe()} returned {part!r:.60} of type {kind}{place}, which a "
            "checkpoint cannot hold. Return numbers, strings, bytes, NumPy arrays, and "
            "lists, tuples and dictionaries of them."
        )


def unpack(state: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns a state from its JSON, and the arrays that `find_names` has named."""
    match state:
        case {"__armillary__": kind, **rest}:
            return _unpack_marked(kind, rest, arrays)
        case list():
            return [unpack(part, arrays) for part in state]
        case dict():
            return {key: unpack(part, arrays) for key, part in state.items()}
    return state


def _unpack_marked(
    kind: str, rest: Mapping[str, Any], arrays: Mapping[str, np.ndarray]
) -> Any:
    if kind == "bytes":
        return base64.b64decode(rest["data"])
    if kind == "tuple":
        return tuple(unpack(rest["items"], arrays))
    if kind == "dictionary":
        keys = [unpack(key, arrays) for key in rest["keys"]]
        values = unpack(rest["values"], arrays)
        return dict(zip(keys, values, strict=True))

    dtype = np.dtype(rest["dtype"])
    if "name" in rest:
        array = arrays[rest["name"]].astype(dtype, copy=False)
        # The program may write to the array of a state, as it did to its own.
        if not array.flags["W"]:
            array = array.copy()
    else:
        data = base64.b64decode(rest["data"])
        array = np.frombuffer(bytearray(data), dtype).reshape(rest["shape"])
    return array[()] if kind == "scalar" else array


def find_names(state: Any) -> Iterator[str]:
    """Yields the names of the arrays that belong to the JSON of a state."""
    if isinstance(state, dict):
        if MARK in state and "name" in state:
            yield state["name"]
            return
        state = list(state.values())
    for part in state if isinstance(state, list) else ():
        yield from find_names(part)


def summarize_state(state: Any) -> Any:
    """Returns the JSON of a state for people, with arrays by dtype and shape."""
    match state:
        case {"__armillary__": "array" | "scalar", "dtype": dtype, "shape": shape}:
            return f"{dtype} {tuple(shape)}"
        case list():
            return [summarize_state(part) for part in state]
        case dict():
            return {key: summarize_state(part) for key, part in state.items()}
    return state


def is_storable(dtype: np.dtype) -> bool:
    """Returns whether arrays of a dtype can be saved: numbers of at most 64 bits."""
    # Not by NumPy, which does not count types such as `bfloat16` among numbers.
    is_bool = jax.dtypes.issubdtype(dtype, np.bool_)
    is_number = is_bool or jax.dtypes.issubdtype(dtype, np.number)
    return is_number and dtype.char not in "gG"


def _join(path: str, key: Any) -> str:
    return f"{path}/{key}" if path else str(key)


def _as_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
