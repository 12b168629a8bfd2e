"""Reads the values of a snapshot, from memory of this machine or of other machines."""

import contextlib
import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from armillary.checkpoint._content import (
    LeafSpec,
    Manifest,
    count_bytes,
    parse_manifest,
)
from armillary.checkpoint.memory._exchange import Address, Connection
from armillary.checkpoint.memory._offer import Holder
from armillary.checkpoint.memory._share import (
    Box,
    Part,
    Share,
    Snapshot,
    as_box,
    parse_share,
    read_array,
)
from armillary.goodput._stopwatch import Category
from armillary.lifeline._transfer import Transfer


class SnapshotSource:
    """The values of a whole snapshot. Each process reads only the parts it needs."""

    def __init__(
        self,
        name: str,
        snapshot: Snapshot,
        folder: Path,
        holders: Mapping[int, Holder],
        addresses: Mapping[int, Address],
        *,
        saved_step: int | None,
    ) -> None:
        self.saved_step = saved_step
        """The step of the last save on the disk, if the disk has it."""
        self._snapshot = snapshot
        self._name = name
        self._folder = folder
        self._holders = holders
        self._addresses = addresses
        self._connections: dict[int, Connection] = {}
        # The holders whose files this process sees, as on the same machine.
        self._here: set[Holder] = set()
        self._closing = contextlib.ExitStack()
        shares = {index: self._read_share(index) for index in holders}
        self._manifest = shares[0].manifest
        # By array: its parts, and the numbers of their shares.
        self._parts: dict[str, list[tuple[int, Part]]] = {}
        for index, share in shares.items():
            for part in share.parts:
                self._parts.setdefault(part.name, []).append((index, part))

    def __str__(self) -> str:
        return self._name

    def close(self) -> None:
        """Closes the connections to other processes."""
        self._closing.close()
        self._connections.clear()

    def read_manifest(self) -> Manifest:
        """Returns the descriptions of leaves, the states, and an evaluation."""
        return parse_manifest(self._manifest)

    def read_arrays(
        self,
        shardings: Mapping[str, jax.sharding.Sharding | None],
        specs: Mapping[str, LeafSpec] = MappingProxyType({}),
    ) -> dict[str, Any]:
        """Returns the named arrays in their shardings; `None` means NumPy."""
        total = count_bytes(shardings, specs)
        transfer = Transfer(Category.RESTORING, "read from memory", total)
        with transfer.reported():
            return {
                name: self._read_array(name, sharding, transfer.add)
                for name, sharding in shardings.items()
            }

    def _read_array(
        self,
        name: str,
        sharding: jax.sharding.Sharding | None,
        note: Callable[[int], None],
    ) -> Any:
        parts = self._parts[name]
        stops = [part.box.stop for _, part in parts]
        shape = tuple(map(max, zip(*stops, strict=True)))
        dtype = jnp.dtype(parts[0][1].dtype)
        # Several devices may need the same part.
        known: dict[Part, np.ndarray] = {}
        assembled: set[Box] = set()

        def assemble(box: Box) -> np.ndarray:
            array = np.empty(box.shape, dtype)
            num_found = 0
            for index, part in parts:
                shared = box.overlap(part.box)
                if shared is None:
                    continue
                if part not in known:
                    known[part] = self._read_part(index, part)
                array[shared.within(box)] = known[part][shared.within(part.box)]
                num_found += math.prod(shared.shape)
            if box not in assembled:
                assembled.add(box)
                note(array.nbytes)
            if num_found != array.size:
                raise ValueError(f"`{name}` has {num_found} of {array.size} elements")
            return array

        if sharding is None:
            return assemble(Box((0,) * len(shape), shape))

        def read(index: Any) -> np.ndarray:
            return assemble(as_box(index, shape))

        return jax.make_array_from_callback(shape, sharding, read, dtype=dtype)

    def _read_part(self, index: int, part: Part) -> np.ndarray:
        holder = self._holders[index]
        file = self._folder / holder.place.data
        if holder not in self._here:
            content = self._connect(holder).read(holder.place, part.offset, part.size)
            if zlib.crc32(content) != part.crc:
                raise ConnectionError(f"`{holder.place.data}` was changed on its way")
            return read_array(content, part)
        if not part.size:
            return read_array(b"", part)
        mapped = np.memmap(file, np.uint8, "r", part.offset, (part.size,))
        return read_array(mapped, part)

    def _read_share(self, index: int) -> Share:
        holder = self._holders[index]
        file = self._folder / holder.place.description
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            share = parse_share(file.read_text())
            # An earlier job may have left a share with the same numbers here.
            if share.snapshot == self._snapshot:
                self._here.add(holder)
                return share
        if holder.process not in self._addresses:
            raise FileNotFoundError(f"`{file}` was removed meanwhile")
        text = self._connect(holder).read_description(holder.place)
        return parse_share(text)

    def _connect(self, holder: Holder) -> Connection:
        if holder.process not in self._connections:
            connection = Connection(self._addresses[holder.process])
            self._closing.callback(connection.close)
            self._connections[holder.process] = connection
        return self._connections[holder.process]
