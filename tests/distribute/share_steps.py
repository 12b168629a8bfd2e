"""Steps whose numbers depend on how replicas share a batch, and steps that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import armillary
from armillary.metrics import Ratio, Sum

ROWS = np.random.default_rng(0)
DATA = {
    "x": ROWS.normal(size=(64, 3)).astype(np.float32),
    "y": ROWS.normal(size=64).astype(np.float32),
    "mask": (ROWS.uniform(size=64) > 0.6).astype(np.float32),
}


def losses_of(w, batch):
    return (batch["x"] @ w - batch["y"]) ** 2


def mean_loss(w, batch):
    return losses_of(w, batch).mean()


def masked_loss(w, batch):
    return (losses_of(w, batch) * batch["mask"]).sum() / batch["mask"].sum()


def recurrent_loss(w, batch):
    """Takes the first axis for time."""

    def cell(hidden, inputs):
        hidden = jnp.tanh(inputs["x"] @ w + 0.9 * hidden)
        return hidden, (hidden - inputs["y"]) ** 2

    return jnp.mean(jax.lax.scan(cell, 0.0, batch)[1])


def normalized_loss(w, batch):
    hidden = batch["x"] * w[None]
    mean = armillary.all_reduce("mean", hidden.mean(0))
    square = armillary.all_reduce("mean", (hidden**2).mean(0))
    deviation = jnp.sqrt(square - mean**2 + 1e-3)
    return (((hidden - mean[None]) / deviation[None]) ** 3).mean()


def contrastive_loss(w, batch):
    hidden = batch["x"] * w[None]
    return jax.nn.logsumexp(hidden @ hidden.T, axis=1).mean()


def distances(w, batch):
    hidden = batch["x"] @ w
    return jnp.abs(hidden[:, None] - hidden[None]).mean()


def labels_losses(w, batch):
    labels = (batch["y"] > 0).astype(int)
    logits = batch["x"] * w[None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def labels_loss(w, batch):
    return labels_losses(w, batch).mean()


def clipped(w, batch):
    gradient = jax.grad(mean_loss)(w, batch)
    clip = optax.clip_by_global_norm(0.1)
    return clip.update(gradient, clip.init(w))[0]


def scaled_by_adam(w, batch):
    adam = optax.scale_by_adam()
    return adam.update(jax.grad(mean_loss)(w, batch), adam.init(w))[0]


def accumulated(w, batch):
    """Adds up the gradients of two parts of a batch."""
    parts = jax.tree.map(lambda rows: rows.reshape(2, -1, *rows.shape[1:]), batch)

    def add(total, part):
        return total + jax.grad(mean_loss)(w, part), None

    return jax.lax.scan(add, jnp.zeros_like(w), parts)[0] / 2


def added_one_by_one(w, batch):
    def add(total, row):
        return total + jax.grad(losses_of)(w, row), None

    total = jax.lax.scan(add, jnp.zeros_like(w), batch)[0]
    return total / len(batch["x"])


def of_each_example(w, batch):
    gradients = jax.vmap(jax.grad(losses_of), (None, 0))(w, batch)
    return gradients.mean(axis=0)


def metric_step(make):
    """Returns a step with the metric of some losses, a batch and gradients."""

    def step(w, batch):
        gradient = jax.grad(mean_loss)(w, batch)
        metric = make(losses_of(w, batch), batch, gradient)
        return w - 0.01 * armillary.all_reduce("mean", gradient), {"metric": metric}

    return step


def gradient_step(make):
    """Returns a step that takes the mean of some gradients."""

    def step(w, batch):
        return w - 0.1 * armillary.all_reduce("mean", make(w, batch)), {}

    return step


def loss_step(loss_fn):
    return gradient_step(jax.grad(loss_fn))


def tokens_loss(w, batch):
    """Adds up the losses of an example's parts, and takes the mean over examples."""
    parts = batch["x"][:, :, None] * w[None, None]
    return (parts**2).sum(axis=(1, 2)).mean()


def weights_loss(w, batch):
    """Normalizes the weights of examples before the sum."""
    weights = batch["mask"] / batch["mask"].sum()
    return (losses_of(w, batch) * weights).sum()


def scaled_weights_loss(w, batch):
    """Multiplies by the reciprocal of a sum."""
    scale = 1 / jnp.maximum(batch["mask"].sum(), 1)
    return (losses_of(w, batch) * batch["mask"] * scale).sum()


def classes_loss(w, batch):
    """Weights the classes by their number in the batch."""
    labels = (batch["y"] > 0).astype(int)
    counts = jax.nn.one_hot(labels, 3).sum(axis=0)
    weights = len(labels) / (3 * counts + 1)
    return (labels_losses(w, batch) * weights[labels]).mean()


def copy(x):
    return jax.lax.stop_gradient(jax.lax.optimization_barrier(x))


def mean_square(x):
    return jnp.mean(x**2)


def covariance_loss(w, batch):
    hidden = batch["x"] * w[None]
    covariance = hidden.T @ hidden / len(hidden)
    return mean_loss(w, batch) + (covariance**2).sum()


def balance_loss(w, batch):
    """Is the loss that balances the experts of a mixture."""
    probabilities = jax.nn.softmax(batch["x"] * w[None])
    chosen = jax.nn.one_hot(probabilities.argmax(axis=1), 3)
    return 3 * (chosen.mean(axis=0) * probabilities.mean(axis=0)).sum()


def deviation_loss(w, batch):
    deviation = jnp.sqrt((batch["x"] * w[None]).var(axis=0) + 1e-3)
    return jax.nn.relu(3 - deviation).mean()


def after_ascent(w, batch):
    """Takes the gradient at a point that the gradient of the share leads to."""
    gradient = jax.grad(mean_loss)(w, batch)
    return jax.grad(mean_loss)(w + 0.1 * gradient, batch)


def adapted_loss(w, batch):
    """Takes one step with half of the examples before the loss of the others."""
    first = jax.tree.map(lambda rows: rows[::2], batch)
    second = jax.tree.map(lambda rows: rows[1::2], batch)
    adapted = w - 0.1 * jax.grad(mean_loss)(w, first)
    return mean_loss(adapted, second)


def follow(w, value):
    return 0.9 * w + 0.1 * value


def state_step(make):
    """Returns a step whose state follows a number of each batch."""

    def step(w, batch):
        return follow(w, make(batch)), {}

    return step


def exchanged_loss(w, batch):
    """Compares own examples with the examples of one replica after another."""
    context = armillary.get_replica_context()
    num_replicas = context.num_replicas_in_sync
    pairs = [(i, (i + 1) % num_replicas) for i in range(num_replicas)]
    own = others = batch["x"] * w[None]
    total = jnp.exp(own @ others.T * w[0]).sum(axis=1)
    for _ in range(num_replicas - 1):
        others = jax.lax.ppermute(others, "replica", pairs)
        total += jnp.exp(own @ others.T * w[0]).sum(axis=1)
    return jnp.log(total).mean()


def hardest_loss(w, batch):
    return jax.lax.top_k(losses_of(w, batch), 2)[0].mean()


def risk_loss(w, batch):
    """Compares each example with those before it."""
    hidden = batch["x"] @ w
    return (jnp.log(jnp.cumsum(jnp.exp(hidden))) - hidden).mean()


def median_of(losses):
    return jnp.sort(losses)[len(losses) // 2]


def ordered_loss(w, batch):
    """Sorts the examples by an expert and puts them back, as mixtures of experts do."""
    order = jnp.argsort(batch["x"][:, 0])
    hidden = (batch["x"][order] * w[None]) ** 2
    return hidden[jnp.argsort(order)].mean()


WRONG = {
    "the exponential of a mean": (
        metric_step(lambda losses, *_: jnp.exp(losses.mean())),
        ("`exp`", "loop_end"),
    ),
    "the largest loss": (
        metric_step(lambda losses, *_: losses.max()),
        ('armillary.all_reduce("max", value)',),
    ),
    "the smallest loss": (
        metric_step(lambda losses, *_: losses.min()),
        ('armillary.all_reduce("min", value)',),
    ),
    "a masked mean": (
        metric_step(
            lambda losses, batch, _: (
                (losses * batch["mask"]).sum() / batch["mask"].sum()
            )
        ),
        ('"metric": armillary.metrics.Ratio(',),
    ),
    "a norm before the reduction": (
        metric_step(lambda _, __, gradient: jnp.linalg.norm(gradient)),
        ("reduced over the examples",),
    ),
    "a standard deviation": (
        metric_step(lambda losses, *_: losses.std()),
        ("`sqrt`",),
    ),
    "the exponential of a mean of labels": (
        metric_step(
            lambda _, batch, __: jnp.exp(labels_losses(jnp.ones(3), batch).mean())
        ),
        ("`exp`",),
    ),
    "a product of means": (
        metric_step(lambda losses, batch, _: losses.mean() * batch["x"].mean()),
        ("`mul`",),
    ),
    "pairs of examples in a metric": (
        metric_step(lambda _, batch, __: contrastive_loss(jnp.ones(3), batch)),
        ("all_gather",),
    ),
    "a constant in a sum": (
        metric_step(lambda *_: Sum(1)),
        ("equal on all 4 replicas", "counts 4 times"),
    ),
    "a sum of means": (
        metric_step(lambda losses, *_: Sum(losses.mean())),
        ("adds up the means of 4 replicas", "4 times larger"),
    ),
    "a sum of maxima": (
        metric_step(lambda losses, *_: Sum(losses.max())),
        ("The metric at ", "`reduce_max`"),
    ),
    "a ratio with a nonlinear sum": (
        metric_step(lambda losses, *_: Ratio(jnp.exp(losses.mean()), 1.0)),
        ("The metric at ", "`exp`"),
    ),
    "a reduced exponential": (
        metric_step(
            lambda losses, *_: armillary.all_reduce("mean", jnp.exp(losses.mean()))
        ),
        ("`exp`", "loop_end"),
    ),
    "a sum of losses": (
        loss_step(lambda w, batch: losses_of(w, batch).sum()),
        ("sum over the 4 examples", "4 times smaller", "loss.mean()"),
    ),
    "half a sum of losses": (
        loss_step(lambda w, batch: 0.5 * losses_of(w, batch).sum()),
        ("4 times smaller",),
    ),
    "the root of a mean": (
        loss_step(lambda w, batch: jnp.sqrt(mean_loss(w, batch))),
        ("gradient of a loss", "weighted_mean"),
    ),
    "the logarithm of a mean": (
        loss_step(lambda w, batch: jnp.log(mean_loss(w, batch))),
        ("gradient of a loss",),
    ),
    "a masked loss": (
        loss_step(masked_loss),
        ("gradient of a loss", "armillary.weighted_mean(values, weights)"),
    ),
    "a masked loss, computed again": (
        loss_step(jax.checkpoint(masked_loss)),
        ("gradient of a loss",),
    ),
    "a compiled masked loss": (
        loss_step(jax.jit(masked_loss)),
        ("gradient of a loss",),
    ),
    "time first": (
        loss_step(recurrent_loss),
        ("first axis", "np.swapaxes"),
    ),
    "contrastive": (loss_step(contrastive_loss), ("all_gather",)),
    "distances": (loss_step(distances), ("all_gather",)),
    "normalized weights": (
        loss_step(weights_loss),
        ("weights of examples", "armillary.weighted_mean(values, weights)"),
    ),
    "weights times a reciprocal": (
        loss_step(scaled_weights_loss),
        ("gradient of a loss", "armillary.weighted_mean(values, weights)"),
    ),
    "weights of classes": (loss_step(classes_loss), ("weights of examples",)),
    "normalized weights in a metric": (
        metric_step(
            lambda losses, batch, _: (
                losses * batch["mask"] / batch["mask"].sum()
            ).sum()
        ),
        ("weights of examples", '"metric": armillary.metrics.Ratio('),
    ),
    "the square of a mean": (
        loss_step(lambda w, batch: mean_loss(w, batch) ** 2),
        ("gradient of a loss",),
    ),
    "a covariance": (loss_step(covariance_loss), ("gradient of a loss",)),
    "a balance of experts": (loss_step(balance_loss), ("gradient of a loss",)),
    "a deviation in a loss": (loss_step(deviation_loss), ("gradient of a loss",)),
    "a gradient after a step": (
        gradient_step(after_ascent),
        ("used before its reduction", 'armillary.all_reduce("mean", gradient)'),
    ),
    "a step within a loss": (
        loss_step(adapted_loss),
        ("used before its reduction",),
    ),
    "the hardest examples": (loss_step(hardest_loss), ("`top_k`", "all_gather")),
    "a median": (
        metric_step(lambda losses, *_: median_of(losses)),
        ("`sort`", "all_gather"),
    ),
    "a risk": (loss_step(risk_loss), ("`cumsum`", "all_gather")),
    "a variance": (
        metric_step(lambda losses, *_: losses.var()),
        ("spread of numbers", "loop_end"),
    ),
    "a variance of copies": (
        metric_step(lambda losses, *_: mean_square(copy(losses - losses.mean()))),
        ("spread of numbers", "loop_end"),
    ),
    "a variance of negative numbers": (
        metric_step(lambda losses, *_: mean_square(-(losses - losses.mean()))),
        ("spread of numbers", "loop_end"),
    ),
    "a ratio to a constant": (
        metric_step(lambda losses, *_: Ratio(losses.sum(), 10.0)),
        ("equal on all 4 replicas", "counts 4 times"),
    ),
    "a number in a sum": (
        metric_step(lambda *_: Sum(3)),
        ("counts 4 times",),
    ),
    "a mean of sums in the state": (
        state_step(lambda batch: armillary.all_reduce("mean", batch["x"].sum(axis=0))),
        ("`state` keeps", "4 times smaller", 'armillary.all_reduce("sum", value)'),
    ),
    "a mean of sums in the state, by JAX": (
        state_step(lambda batch: jax.lax.pmean(batch["x"].sum(axis=0), "replica")),
        ("`state` keeps", "4 times smaller"),
    ),
    "clipped before the reduction": (gradient_step(clipped), ("clipped after",)),
    "an optimizer before the reduction": (
        gradient_step(scaled_by_adam),
        ("Reduce first",),
    ),
}
RIGHT = {
    "a mean": metric_step(lambda losses, *_: losses.mean()),
    "an accuracy": metric_step(lambda losses, *_: (losses > 1).mean()),
    "losses": metric_step(lambda losses, *_: losses),
    "a constant": metric_step(lambda *_: jnp.float32(0.1)),
    "the mean of exponentials": metric_step(lambda losses, *_: jnp.exp(-losses).mean()),
    "a map": metric_step(lambda losses, *_: jax.lax.map(jnp.tanh, losses).mean()),
    "a norm after the reduction": metric_step(
        lambda _, __, gradient: jnp.linalg.norm(armillary.all_reduce("mean", gradient))
    ),
    "the exponential of a reduced mean": metric_step(
        lambda losses, *_: jnp.exp(armillary.all_reduce("mean", losses.mean()))
    ),
    "a quotient of reduced sums": metric_step(
        lambda losses, batch, _: (
            armillary.all_reduce("sum", losses @ batch["mask"])
            / armillary.all_reduce("sum", batch["mask"].sum())
        )
    ),
    "the largest of all": metric_step(
        lambda losses, *_: armillary.all_reduce("max", losses.max())
    ),
    "a number of examples": metric_step(lambda losses, *_: Sum(len(losses))),
    "a sum": metric_step(lambda losses, *_: Sum(losses)),
    "a ratio": metric_step(
        lambda losses, batch, _: Ratio(losses @ batch["mask"], batch["mask"].sum())
    ),
    "a mean loss": loss_step(mean_loss),
    "a sum over a sum of ones": loss_step(
        lambda w, batch: losses_of(w, batch).sum() / jnp.ones(len(batch["y"])).sum()
    ),
    "flags and complex numbers": metric_step(
        lambda losses, *_: jnp.where(
            jnp.ones(len(losses), bool), losses * (1 + 2j), 2j
        ).real.mean()
    ),
    "a penalty": loss_step(lambda w, batch: mean_loss(w, batch) + 0.1 * (w @ w)),
    "a nonlinear penalty": loss_step(
        lambda w, batch: mean_loss(w, batch) + jnp.sqrt(1 + w @ w)
    ),
    "labels": loss_step(labels_loss),
    "weights of labels": loss_step(
        lambda w, batch: (labels_losses(w, batch) * batch["mask"]).mean()
    ),
    "a weighted mean of labels": loss_step(
        lambda w, batch: armillary.weighted_mean(labels_losses(w, batch), batch["mask"])
    ),
    "pairs": loss_step(
        lambda w, batch: jnp.tanh(losses_of(w, batch).reshape(-1, 2).max(1)).mean()
    ),
    "a scaled loss": loss_step(lambda w, batch: 1024 * mean_loss(w, batch) / 1024),
    "sums of parts": loss_step(tokens_loss),
    "computed again": loss_step(jax.checkpoint(mean_loss)),
    "normalized by all replicas": loss_step(normalized_loss),
    "a weighted mean": loss_step(
        lambda w, batch: armillary.weighted_mean(losses_of(w, batch), batch["mask"])
    ),
    "the root of the mean of all": loss_step(
        lambda w, batch: jnp.sqrt(armillary.all_reduce("mean", mean_loss(w, batch)))
    ),
    "a ratio to the size": metric_step(
        lambda losses, *_: Ratio(losses.sum(), len(losses))
    ),
    "a ratio of means": metric_step(lambda losses, *_: Ratio(losses.mean(), 1.0)),
    "a variance of each example": metric_step(
        lambda _, batch, __: batch["x"].var(axis=1).mean()
    ),
    "weights that all replicas normalize": loss_step(
        lambda w, batch: (
            losses_of(w, batch)
            * batch["mask"]
            / armillary.all_reduce("mean", batch["mask"].sum())
        ).sum()
    ),
    "a covariance of all": loss_step(
        lambda w, batch: (
            (
                armillary.all_reduce(
                    "mean", batch["x"].T @ batch["x"] / len(batch["x"])
                )
                @ w
            )
            ** 2
        ).sum()
    ),
    "the best numbers of each example": loss_step(
        lambda w, batch: jax.lax.top_k(batch["x"] * w[None], 2)[0].mean()
    ),
    "an order of examples and back": loss_step(ordered_loss),
    "a sum along each example": loss_step(
        lambda w, batch: (jnp.cumsum(batch["x"] * w[None], axis=1) ** 2).mean()
    ),
    "a gradient after a reduced step": gradient_step(
        lambda w, batch: jax.grad(mean_loss)(
            w + 0.1 * armillary.all_reduce("mean", jax.grad(mean_loss)(w, batch)),
            batch,
        )
    ),
    "the gradient of each example": loss_step(
        lambda w, batch: (
            mean_loss(w, batch)
            + (jax.grad(lambda x: jnp.tanh(x @ w).sum())(batch["x"]) ** 2).mean()
        )
    ),
    "a sum of sums in the state": state_step(
        lambda batch: armillary.all_reduce("sum", batch["x"].sum(axis=0))
    ),
    "a mean of means in the state": state_step(
        lambda batch: armillary.all_reduce("mean", batch["x"].mean(axis=0))
    ),
    "a quotient of means in the state": state_step(
        lambda batch: (
            armillary.all_reduce("mean", batch["x"].sum(axis=0))
            / armillary.all_reduce("mean", batch["mask"].sum())
        )
    ),
    "examples of other replicas": loss_step(exchanged_loss),
    "parts of a batch": gradient_step(accumulated),
    "one by one": gradient_step(added_one_by_one),
    "of each example": gradient_step(of_each_example),
}


def train(step, num_devices, state=None):
    """Returns the state and the metrics after three steps."""
    trainer = armillary.StepTrainer(
        step,
        np.ones(3, np.float32) if state is None else state,
        armillary.data.from_arrays(DATA, batch_size=16),
        strategy=armillary.MirroredStrategy(jax.devices()[:num_devices]),
    )
    metrics = trainer.train(3)
    return jax.device_get(trainer.state), metrics


def is_equal(step):
    one, four = train(step, 1), train(step, 4)
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(four), strict=True)
    return all(np.allclose(a, b, rtol=1e-4) for a, b in pairs)
