"""Names of arrays in TensorFlow's checkpoints of BERT.

A checkpoint has either the names of google-research/bert, or the objects of the
TensorFlow Model Garden. Here every array gets the name that google-research/bert gave
it, without `bert/`, such as `encoder/layer_0/attention/self/query/kernel`.
"""

import re

import numpy as np

# Names in a checkpoint of the TensorFlow Model Garden.
LAYER = re.compile(
    r"(\w+/)*layer_with_weights-(?P<number>\d+)/(?P<path>[\w/]+)"
    r"/\.ATTRIBUTES/VARIABLE_VALUE"
)
EMBEDDINGS = [
    f"embeddings/{name}_embeddings" for name in ("word", "position", "token_type")
]
# The objects in a layer of the encoder.
OBJECTS = {
    "_attention_layer/_query_dense": "attention/self/query",
    "_attention_layer/_key_dense": "attention/self/key",
    "_attention_layer/_value_dense": "attention/self/value",
    "_attention_layer/_output_dense": "attention/output/dense",
    "_attention_output_dense": "attention/output/dense",
    "_attention_layer_norm": "attention/output/LayerNorm",
    "_intermediate_dense": "intermediate/dense",
    "_output_dense": "output/dense",
    "_output_layer_norm": "output/LayerNorm",
}


def from_tensorflow(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint by the names of google-research/bert."""
    if any("layer_with_weights-" in name for name in tensors):
        return from_objects(tensors)

    arrays = {}
    for name, array in tensors.items():
        if name == "output_weights":
            arrays["classifier/kernel"] = array.T
        elif name == "output_bias":
            arrays["classifier/bias"] = array
        else:
            arrays[name.removeprefix("bert/")] = array
    return arrays


def from_objects(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the arrays of a checkpoint that the Model Garden wrote, an encoder.

    Its names are paths of objects, such as
    `model/layer_with_weights-4/_attention_layer/_query_dense/kernel`. The layers are
    numbered: three embeddings, a layer norm, the layers of the encoder, and the pooler.
    """
    layers: dict[int, dict[str, np.ndarray]] = {}
    arrays = {}
    for name, array in tensors.items():
        match = LAYER.fullmatch(name)
        if match is None:
            arrays[name] = array
        else:
            layers.setdefault(int(match["number"]), {})[match["path"]] = array

    embeddings = iter(EMBEDDINGS)
    num_encoder_layers = 0
    for _, layer in sorted(layers.items()):
        if "embeddings" in layer:
            module = {"embeddings": next(embeddings, "embeddings/unknown")}
        elif "gamma" in layer:
            module = {leaf: f"embeddings/LayerNorm/{leaf}" for leaf in layer}
        elif "kernel" in layer:
            module = {leaf: f"pooler/dense/{leaf}" for leaf in layer}
        else:
            prefix = f"encoder/layer_{num_encoder_layers}"
            module = {path: f"{prefix}/{rename_in_layer(path)}" for path in layer}
            num_encoder_layers += 1
        for path, name in module.items():
            arrays[name] = without_heads(name, layer[path])
    return arrays


def rename_in_layer(path: str) -> str:
    """Returns the name of an array in a layer, from the names of its objects."""
    module, _, leaf = path.rpartition("/")
    return f"{OBJECTS.get(module, module)}/{leaf}"


def without_heads(name: str, array: np.ndarray) -> np.ndarray:
    """Returns an array of attention with its heads side by side in one axis."""
    if "/attention/self/" in name and name.endswith("/kernel"):
        return array.reshape(array.shape[0], -1)
    if "/attention/self/" in name:
        return array.reshape(-1)
    if name.endswith("/attention/output/dense/kernel"):
        return array.reshape(-1, array.shape[-1])
    return array
