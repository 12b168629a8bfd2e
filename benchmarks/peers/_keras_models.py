"""The tasks' models in Keras, as its users write them, from inputs to logits.

`keras` is an argument: Keras 3, or Keras 2 as `tf_keras`, which Orbit's users have.
"""

from functools import partial
from typing import Any

from benchmarks.tasks import BertTask, CnnTask, ManyLeavesTask, MlpTask, Task


def make_model(keras: Any, task: Task) -> Any:
    """Returns a model, its weights as the task starts them.

    Args:
        keras: The module `keras` or `tf_keras`.
        task: The task of the model.

    Raises:
        TypeError: If there is no model of this task.
    """
    match task:
        case MlpTask():
            return _make_mlp(keras, task)
        case CnnTask():
            return _make_cnn(keras, task)
        case BertTask():
            return _make_bert(keras, task)
        case ManyLeavesTask():
            return _make_many_leaves(keras, task)
    raise TypeError(
        f"`task` is a {type(task).__name__}, but there is no Keras model of it. Add "
        "one to `benchmarks/peers/_keras_models.py`."
    )


def _make_mlp(keras: Any, task: MlpTask) -> Any:
    dense = partial(keras.layers.Dense, kernel_initializer="lecun_normal")
    return keras.Sequential(
        [
            keras.layers.Input((task.input_size,)),
            dense(task.hidden_size, activation="relu"),
            dense(task.num_classes),
        ]
    )


def _make_cnn(keras: Any, task: CnnTask) -> Any:
    layers = keras.layers
    make = {"kernel_initializer": "lecun_normal"}
    first, second = task.channels
    return keras.Sequential(
        [
            layers.Input((task.image_size, task.image_size, 1)),
            layers.Conv2D(first, 3, padding="same", activation="relu", **make),
            layers.MaxPooling2D(2),
            layers.Conv2D(second, 3, padding="same", activation="relu", **make),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(task.hidden_size, activation="relu", **make),
            layers.Dense(task.num_classes, **make),
        ]
    )


def _make_many_leaves(keras: Any, task: ManyLeavesTask) -> Any:
    layers = keras.layers
    image = x = layers.Input((task.width,))
    for _ in range(task.num_layers):
        dense = layers.Dense(
            task.width, activation="tanh", kernel_initializer="lecun_normal"
        )
        x = x + 0.1 * dense(x)
    return keras.Model(image, x)


def _make_bert(keras: Any, task: BertTask) -> Any:
    layers = keras.layers
    initial = partial(keras.initializers.TruncatedNormal, stddev=0.02)
    size = task.hidden_size

    def dense(units: int, **options: Any) -> Any:
        return layers.Dense(units, kernel_initializer=initial(), **options)

    def embed(count: int) -> Any:
        return layers.Embedding(count, size, embeddings_initializer=initial())

    def norm() -> Any:
        return layers.LayerNormalization(epsilon=1e-12)

    def gelu(x: Any) -> Any:
        return keras.activations.gelu(x, approximate=True)

    class Positions(layers.Layer):
        """One learned vector for each place in a sequence, added to all."""

        def build(self, input_shape: Any) -> None:
            del input_shape
            self.table = self.add_weight(
                name="table",
                shape=(task.sequence_length, size),
                initializer=initial(),
            )

        def call(self, x: Any) -> Any:
            return x + self.table

    def make_input(name: str) -> Any:
        return layers.Input((task.sequence_length,), dtype="int32", name=name)

    inputs = {name: make_input(name) for name in ("word_ids", "mask", "type_ids")}
    x = embed(task.vocabulary_size)(inputs["word_ids"])
    x = x + embed(task.num_types)(inputs["type_ids"])
    x = norm()(Positions()(x))
    # One row of keys that every query may see: (batch, 1, keys).
    mask = layers.Reshape((1, task.sequence_length))(inputs["mask"])
    for _ in range(task.num_layers):
        attention = layers.MultiHeadAttention(
            task.num_heads, size // task.num_heads, kernel_initializer=initial()
        )
        x = norm()(x + attention(x, x, attention_mask=mask))
        x = norm()(x + dense(size)(dense(task.mlp_size, activation=gelu)(x)))
    pooled = dense(size, activation="tanh")(x[:, 0])
    return keras.Model(inputs, dense(task.num_classes)(pooled))
