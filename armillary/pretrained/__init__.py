"""Pretrained weights: models from files of safetensors, and back.

One table of names says which tensors of the files are which arrays of the model. It is
used in both directions::

    names = pretrained.Names([
        ("model.embed_tokens.weight", "embed/embedding"),
        ("model.layers.{layer}.mlp.up_proj.weight", "blocks/up/kernel",
         pretrained.transpose),
        ("lm_head.weight", "embed/embedding", pretrained.tied),
    ])
    pretrained.load(model, "llama", names)
    pretrained.save(model, "llama_tuned", names)

`list_tensors` shows the names in the files. `load` reads only the parts that this
process has on its devices, and changes nothing if anything differs. `transformers`
reads the files that `save` writes.
"""

from armillary._traceback import mark_public as _mark_public
from armillary.pretrained._files import list_tensors as list_tensors
from armillary.pretrained._load import load as load
from armillary.pretrained._names import Names as Names
from armillary.pretrained._save import save as save
from armillary.pretrained._transforms import join as join
from armillary.pretrained._transforms import rearrange as rearrange
from armillary.pretrained._transforms import split as split
from armillary.pretrained._transforms import tied as tied
from armillary.pretrained._transforms import transpose as transpose

_mark_public(globals())
