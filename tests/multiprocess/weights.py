"""The program of a job that loads and saves a decoder in safetensors."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import armillary
from armillary import pretrained
from armillary.distribute._global_arrays import as_local
from armillary.lifeline import _lifeline
from armillary.pretrained import _files
from tests.examples.loading import load_example
from tests.multiprocess.scenarios import catch, run_scenario
from tests.patience import patience

decoder = load_example("decoder.model")
families = load_example("decoder.families")
RULES = {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}
RULES |= {"tokens": None, "blocks": None}
MAX_BYTES = 3_000


def make_model(strategy: Any, folder: Path) -> tuple[nnx.Module, pretrained.Names]:
    config = families.read_config(folder)
    model = strategy.make(lambda: decoder.Decoder(config, nnx.Rngs(0)))
    return model, families.make_names(config)


def compute(strategy: Any, model: Any, tokens: list[Any]) -> list[Any]:
    """Returns the logits of all tokens."""
    call = nnx.jit(lambda model, tokens: model(tokens))
    with strategy.scope():
        logits = call(model, np.asarray(tokens))
    return np.asarray(as_local(logits)).tolist()


def count_own_bytes(model: nnx.Module) -> tuple[int, int]:
    """Returns the bytes of the parts on this process's devices, and of all arrays."""
    own = whole = 0
    for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)):
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
        parts = {str(index): index for index in indices.values()}
        for index in parts.values():
            own += np.empty(leaf.shape, leaf.dtype)[index].nbytes
        whole += leaf.nbytes
    return own, whole


def weights(source: str, new: str, tuned: str, tokens: list[Any]) -> dict[str, Any]:
    """Loads, computes and saves, and then makes mistakes."""
    strategy = armillary.ShardedStrategy({"fsdp": 2, "tensor": 2}, logical_rules=RULES)
    read_bytes = []
    read_slice = _files.read_slice

    def count(*arguments: Any) -> np.ndarray:
        part = read_slice(*arguments)
        read_bytes.append(part.nbytes)
        return part

    _files.read_slice = count
    model, names = make_model(strategy, Path(source))
    pretrained.load(model, source, names)
    own, whole = count_own_bytes(model)
    found: dict[str, Any] = {"read": sum(read_bytes), "own": own, "whole": whole}
    found["logits"] = compute(strategy, model, tokens)
    paths = pretrained.save(model, new, names, max_file_bytes=MAX_BYTES)
    found["files"] = [Path(path).name for path in paths]

    # The last process has a full disk.
    sync = os.fsync
    if jax.process_index() == jax.process_count() - 1:
        os.fsync = fail
    found["full"] = catch(lambda: pretrained.save(model, new, names, max_file_bytes=10))
    os.fsync = sync

    # It also sees another copy, with the same names and other values.
    is_last = jax.process_index() == jax.process_count() - 1
    kernel = model.blocks.up.kernel[...]
    other = tuned if is_last else source
    found["tuned"] = catch(lambda: pretrained.load(model, other, names))

    # And then no files at all, after which the job has failed.
    place = f"{source}/other" if is_last else source
    found["absent"] = catch(lambda: pretrained.load(model, place, names))
    found["is_kept"] = model.blocks.up.kernel[...] is kernel
    return found


def fail(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def main() -> None:
    _lifeline._FAILURE_SECONDS = patience(5.0)
    run_scenario(globals())


if __name__ == "__main__":
    main()
