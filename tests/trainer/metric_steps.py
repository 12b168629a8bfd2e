"""A trainer and an evaluator around metrics, and their data."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.metrics import f1_score

import armillary
from armillary import metrics
from armillary.data import from_arrays

RNG = np.random.default_rng(0)


NUM = 52  # in batches of 16, of which the last has 4 examples


DATA = {
    "loss": RNG.normal(size=(NUM, 6)).astype("float32"),
    # The number of tokens grows, so that batches weigh different amounts.
    "weight": (RNG.uniform(size=(NUM, 6)) < np.linspace(0.1, 1, NUM)[:, None]),
    "score": RNG.normal(size=(NUM, 3)).astype("float32"),
    "label": RNG.integers(0, 3, NUM).astype("int32"),
    "length": RNG.integers(-5, 10**6, NUM).astype("int32"),
}


STRATEGIES = {
    "4 replicas": lambda: armillary.MirroredStrategy(jax.devices()[:4]),
    "one device": lambda: armillary.OneDeviceStrategy("cpu:0"),
    "4 devices, sharded": lambda: armillary.ShardedStrategy(
        {"data": 4}, devices=jax.devices()[:4]
    ),
}


def measure(batch):
    accuracy = nnx.metrics.Accuracy()
    accuracy.update(logits=batch["score"], labels=batch["label"])
    f1 = metrics.F1Score(num_classes=3)
    f1.update(logits=batch["score"], labels=batch["label"])
    several = nnx.MultiMetric(loss=nnx.metrics.Average(), squares=metrics.Sum())
    several.update(values=batch["loss"])
    weighted = batch["loss"] * batch["weight"]
    return {
        "of each": batch["loss"],
        "correct": batch["score"].argmax(-1) == batch["label"],
        "number": {"mean": jnp.mean(batch["loss"]), "rate": 0.1},
        "length": batch["length"],
        "tokens": metrics.Sum(batch["weight"]),
        "characters": metrics.Sum(batch["length"]),
        "ratio": metrics.Ratio(weighted.sum(), batch["weight"].sum()),
        "weighted": metrics.WeightedMean(batch["loss"], batch["weight"]),
        "by length": metrics.WeightedMean(batch["loss"], batch["length"]),
        "accuracy": accuracy,
        "f1": f1,
        "several": several,
    }


def step(state, batch):
    return state + 1, measure(batch)


def make_trainer(strategy, train=step, data=DATA, **arguments):
    return armillary.StepTrainer(
        train,
        jnp.zeros((), jnp.int32),
        from_arrays(data, batch_size=16),
        strategy=strategy,
        **arguments,
    )


def expect(rows):
    """Returns the metrics of `measure` in NumPy, in 64 bits, over all rows together."""
    loss = DATA["loss"][rows].astype("float64")
    weight, length = DATA["weight"][rows], DATA["length"][rows]
    is_right = DATA["score"][rows].argmax(-1) == DATA["label"][rows]
    lengths = np.broadcast_to(length[:, None], loss.shape)
    return {
        "of each": loss.mean(),
        "correct": is_right.mean(),
        "number": {"mean": loss.mean(), "rate": 0.1},
        "length": length.mean(),
        "tokens": weight.sum(),
        "characters": length.sum(),
        "ratio": loss[weight].mean(),
        "weighted": loss[weight].mean(),
        "by length": np.average(loss, weights=lengths),
        "accuracy": is_right.mean(),
        "f1": f1_score(
            DATA["label"][rows], DATA["score"][rows].argmax(-1), average="macro"
        ),
        "several": {"loss": loss.mean(), "squares": loss.sum()},
    }
