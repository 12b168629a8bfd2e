"""`DataLoader` of PyTorch as a source.

`StatefulDataLoader` of torchdata is one, and can be repositioned. Tensors become NumPy
arrays that share their memory. Nothing here imports PyTorch.
"""

import io
import sys
from typing import Any

import jax

from armillary.data.sources._iterable import IterableSource, copy_batch
from armillary.data.sources._stateful import StatefulSource, has_state_dict
from armillary.typing import Batch


def as_torch_source(source: Any) -> IterableSource | StatefulSource | None:
    """Returns a source if `source` is a `DataLoader` of PyTorch, or None."""
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(source, data.DataLoader):
        return None
    name = f"torch {type(source).__name__}"
    # Without a batch size, a loader gives what the data set gives, perhaps a buffer.
    copies = source.batch_size is None and source.batch_sampler is None
    if has_state_dict(source):
        return StatefulSource(
            source,
            name,
            (lambda batch: copy_batch(as_numpy(batch))) if copies else as_numpy,
            pack=_pack,
            unpack=_unpack,
        )
    return IterableSource(lambda: map(as_numpy, source), name, copies=copies)


def as_numpy(batch: Any) -> Batch:
    """Returns a batch with NumPy arrays in place of tensors."""
    torch: Any = sys.modules["torch"]

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.device.type != "cpu" or leaf.layout != torch.strided:
            raise TypeError(
                f"A batch of the `DataLoader` has a tensor on {leaf.device} "
                f"({leaf.layout}), but data must be dense and in the memory of the "
                "host. Return `tensor.cpu()` (`tensor.to_dense()`) from the data set "
                "or its `collate_fn`; the strategy moves batches to its devices."
            )
        leaf = leaf.detach().resolve_conj().resolve_neg()
        if leaf.dtype == torch.bfloat16:
            return leaf.view(torch.int16).numpy().view(jax.numpy.bfloat16)
        return leaf.numpy()

    return jax.tree.map(convert, batch)


def _pack(state: Any) -> bytes:
    """Returns a state as bytes, since it holds tensors."""
    torch: Any = sys.modules["torch"]

    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def _unpack(state: bytes) -> Any:
    torch: Any = sys.modules["torch"]

    # Nothing but tensors and plain values: a checkpoint may come from anywhere.
    return torch.load(io.BytesIO(state), weights_only=True)
