"""LoRA: low-rank adapters for the weights of any Flax NNX model.

`add` gives each chosen weight two narrow matrices, `lora_a` and `lora_b`. The layer
then computes with `weight + lora_a @ lora_b`, without ever making that sum. Only the
variables of type `nnx.LoRAParam` are trained, and the base stays frozen::

    armillary.lora.add(model, rank=8, where="attention/.*kernel", rngs=nnx.Rngs(1))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.LoRAParam)
    checkpoint = armillary.Checkpoint(
        trainer=trainer, leave_out=armillary.lora.base(model)
    )
    ...
    merged = armillary.lora.merge(model)  # plain layers, to export or to serve
    armillary.lora.remove(model)  # the base again, bit for bit

The layers remain the same objects, and no path changes. So sharding rules and
checkpoints of the base work with adapters, too. Code that reads `layer.kernel` itself
gets the base without the adapter, so it must call the layer instead.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.lora._model import add as add
from armillary.lora._model import base as base
from armillary.lora._model import merge as merge
from armillary.lora._model import remove as remove

_mark_public(globals())
