"""Trains a generator of handwritten digits against a discriminator.

Two models and two optimizers take turns in one training step: by default the
discriminator learns from two batches, and then the generator makes one step. The images
are those that come with scikit-learn. The Fréchet distance shows how far the generated
images are from the real ones: 11 for an untrained generator, 0.06 between two halves of
the real images.

    python examples/gan.py --devices 2 --run-dir runs/gan

It prints both losses of each loop and the Fréchet distance of each evaluation, which
ends near 0.2.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import armillary
from armillary.summary import Image

BATCH_SIZE = 64
NOISE_SIZE = 16
cross_entropy = optax.sigmoid_binary_cross_entropy


class Generator(nnx.Module):
    """Makes images of 64 pixels between 0 and 1 from noise."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(NOISE_SIZE, 128, rngs=rngs)
        self.norm = nnx.LayerNorm(128, rngs=rngs)
        self.output = nnx.Linear(128, 64, rngs=rngs)

    def __call__(self, noise: jax.Array) -> jax.Array:
        """Returns images of shape `(batch, 64)` for noise `(batch, NOISE_SIZE)`."""
        return nnx.sigmoid(self.output(nnx.relu(self.norm(self.hidden(noise)))))


class Discriminator(nnx.Module):
    """Tells real images from generated ones."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 128, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.output = nnx.Linear(128, 1, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns a logit for each image, positive for those that look real."""
        x = nnx.leaky_relu(self.hidden(images), 0.2)
        return self.output(self.dropout(x))[:, 0]


class Trainer(armillary.StandardTrainer):
    """Reports both losses, and the fraction of images the discriminator gets right."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        models: tuple[Generator, Discriminator],
        optimizers: tuple[nnx.Optimizer, nnx.Optimizer],
        *,
        turns: tuple[int, int],
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.generator, self.discriminator = models
        self.generator_optimizer, self.discriminator_optimizer = optimizers
        self.generator_turns, self.discriminator_turns = turns
        self.rngs = nnx.Rngs(1)
        self.global_step = armillary.create_global_step()
        self.generator_loss = nnx.metrics.Average("loss")
        self.discriminator_loss = nnx.metrics.Average("loss")
        self.accuracy = nnx.metrics.Average("is_right")

    def train_loop_begin(self) -> None:
        self.generator_loss.reset()
        self.discriminator_loss.reset()
        self.accuracy.reset()

    def train_step(self, iterator) -> None:
        for _ in range(self.discriminator_turns):
            self.strategy.run(self.train_discriminator, args=(next(iterator),))
        for _ in range(self.generator_turns):
            self.strategy.run(self.train_generator)
        self.global_step[...] += 1

    def train_discriminator(self, real) -> None:
        fake = self.generator(self.rngs.normal((real.shape[0], NOISE_SIZE)))

        def loss_fn(discriminator):
            on_real, on_fake = discriminator(real), discriminator(fake)
            losses = cross_entropy(on_real, jnp.ones_like(on_real))
            losses += cross_entropy(on_fake, jnp.zeros_like(on_fake))
            return jnp.mean(losses), (losses, on_real, on_fake)

        gradients, (losses, on_real, on_fake) = nnx.grad(loss_fn, has_aux=True)(
            self.discriminator
        )
        gradients = armillary.all_reduce("mean", gradients)
        self.discriminator_optimizer.update(self.discriminator, gradients)
        self.discriminator_loss.update(loss=losses)
        self.accuracy.update(is_right=jnp.concatenate([on_real > 0, on_fake <= 0]))

    def train_generator(self) -> None:
        # There is no batch that shows how many images this replica should draw.
        batch_size = BATCH_SIZE // self.strategy.num_replicas_in_sync
        noise = self.rngs.normal((batch_size, NOISE_SIZE))

        # The discriminator draws for its dropout, so Flax wants it as an argument.
        def loss_fn(generator, discriminator):
            logits = discriminator(generator(noise))
            losses = cross_entropy(logits, jnp.ones_like(logits))
            return jnp.mean(losses), losses

        gradients, losses = nnx.grad(loss_fn, has_aux=True)(
            self.generator, self.discriminator
        )
        gradients = armillary.all_reduce("mean", gradients)
        self.generator_optimizer.update(self.generator, gradients)
        self.generator_loss.update(loss=losses)

    def train_loop_end(self) -> dict:
        return {
            "generator_loss": self.generator_loss.compute(),
            "discriminator_loss": self.discriminator_loss.compute(),
            "discriminator_accuracy": self.accuracy.compute(),
        }


class Evaluator(armillary.StandardEvaluator):
    """Compares generated images with all real ones, and shows a few.

    The noise comes from the dataset: every evaluation draws the same images.
    """

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        generator: Generator,
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.generator = generator

    def eval_begin(self) -> list:
        return []

    def eval_step(self, iterator):
        def step_fn(batch):
            return batch["real"], self.generator(batch["noise"])

        images = self.strategy.run(step_fn, args=(next(iterator),))
        return self.strategy.gather(images, axis=0)

    def eval_reduce(self, state, step_outputs) -> list:
        return [*state, jax.device_get(step_outputs)]

    def eval_end(self, state) -> dict:
        real, fake = (np.concatenate(images) for images in zip(*state, strict=True))
        # Sixteen images side by side.
        samples = fake[:16].reshape(16, 8, 8).swapaxes(0, 1).reshape(8, 128)
        return {"distance": frechet_distance(real, fake), "samples": Image(samples)}


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the Fréchet distance between normal distributions fitted to two sets.

    The Fréchet inception distance compares features that a large network computes. For
    images of 64 pixels, the pixels themselves are enough.
    """
    covariances = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    eigenvalues = np.linalg.eigvals(covariances[0] @ covariances[1]).real
    root = np.sqrt(np.maximum(eigenvalues, 0.0)).sum()
    means = np.sum((a.mean(axis=0) - b.mean(axis=0)) ** 2)
    return float(means + np.trace(covariances[0] + covariances[1]) - 2.0 * root)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generates handwritten digits.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/gan"))
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--steps-per-loop", type=int, default=500)
    parser.add_argument("--generator-turns", type=int, default=1)
    parser.add_argument("--discriminator-turns", type=int, default=2)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    images, _ = load_digits(return_X_y=True)
    images = images.astype("float32") / 16.0
    noise = np.random.default_rng(0).normal(size=(len(images), NOISE_SIZE))
    train_data = armillary.data.from_arrays(
        images, batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
    )
    test_data = armillary.data.from_arrays(
        {"real": images, "noise": noise.astype("float32")}, batch_size=256
    )
    train_dataset = strategy.distribute_dataset(train_data)
    with strategy.scope():
        models = Generator(nnx.Rngs(0)), Discriminator(nnx.Rngs(1))
        adam = optax.adam(1e-3, b1=0.5)
        optimizers = (
            nnx.Optimizer(models[0], adam, wrt=nnx.Param),
            nnx.Optimizer(models[1], adam, wrt=nnx.Param),
        )
    turns = options.generator_turns, options.discriminator_turns
    trainer = Trainer(train_dataset, strategy, models, optimizers, turns=turns)
    evaluator = Evaluator(strategy.distribute_dataset(test_data), strategy, models[0])
    controller = armillary.Controller(
        trainer=trainer,
        evaluator=evaluator,
        global_step=trainer.global_step,
        strategy=strategy,
        steps_per_loop=options.steps_per_loop,
        summary_dir=options.run_dir / "train",
        eval_summary_dir=options.run_dir / "eval",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            options.run_dir / "checkpoints",
            checkpoint_interval=2000,
        ),
    )
    result = controller.train_and_evaluate(
        train_steps=options.steps, eval_interval=2000
    )
    print(f"Fréchet distance {result['distance']:.2f}")
    print(f"Look at the images with tensorboard --logdir {options.run_dir}")


if __name__ == "__main__":
    main()
