"""Draws handwritten digits with a diffusion model (DDPM), and writes a picture of them.

A step adds noise of a random strength to images, and the model learns to tell the noise
from the image. To draw, it begins with noise and removes it in 100 small steps. Samples
come from a moving average of the parameters (EMA). The data are the 1,797 images of
8 x 8 pixels that come with scikit-learn.

    python examples/diffusion.py --devices 2 --run-dir runs/diffusion

It prints the loss of each 500 steps. At the end, it prints the path of the picture,
which has a row for each digit, and the share of the samples that a nearest-neighbor
classifier recognizes. Run the same command again, and training continues from the last
checkpoint.
"""

import argparse
import struct
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

import armillary

BATCH_SIZE = 128
NUM_TIMES = 100
STEP_SIZE = 0.001  # of the moving average


class Denoiser(nnx.Module):
    """Estimates the noise in an image, given its time and the digit that it shows."""

    def __init__(self, rngs: nnx.Rngs, width: int = 256) -> None:
        self.time = nnx.Embed(NUM_TIMES, width, rngs=rngs)
        self.digit = nnx.Embed(10, width, rngs=rngs)
        self.first = nnx.Linear(64, width, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(3)])
        self.hidden = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(3)])
        self.last = nnx.Linear(width, 64, rngs=rngs)

    def __call__(
        self, images: jax.Array, times: jax.Array, digits: jax.Array
    ) -> jax.Array:
        """Returns the noise in images of shape `(batch, 64)`, with their shape."""
        condition = self.time(times) + self.digit(digits)
        x = self.first(images)
        for norm, hidden in zip(self.norms, self.hidden, strict=True):
            x = x + hidden(nnx.silu(norm(x) + condition))
        return self.last(nnx.silu(x))


def make_schedule() -> tuple[jax.Array, jax.Array]:
    """Returns the noise that each time adds, and the share of the image left."""
    betas = jnp.linspace(1e-3, 0.12, NUM_TIMES)
    return betas, jnp.cumprod(1.0 - betas)


class Trainer(armillary.StandardTrainer):
    """Trains the model, and keeps a moving average of its parameters."""

    def __init__(
        self,
        dataset: armillary.data.DistributedDataset,
        strategy: armillary.distribute.Strategy,
        model: Denoiser,
        average: Denoiser,
        optimizer: nnx.Optimizer[Denoiser],
    ) -> None:
        super().__init__(dataset)
        self.strategy = strategy
        self.model = model
        self.average = average
        self.optimizer = optimizer
        self.rngs = nnx.Rngs(1)
        self.loss = nnx.metrics.Average("loss")

    def train_loop_begin(self) -> None:
        self.loss.reset()

    def train_step(self, iterator) -> None:
        self.strategy.run(self.replica_step, args=(next(iterator),))

    def replica_step(self, batch) -> None:
        images = batch["image"]
        # Each replica draws its own times and noise.
        times = self.rngs.randint((len(images),), 0, NUM_TIMES)
        noise = self.rngs.normal(images.shape)
        _, shares = make_schedule()
        share = shares[times][:, None]
        noisy = jnp.sqrt(share) * images + jnp.sqrt(1.0 - share) * noise

        def loss_fn(model):
            losses = (model(noisy, times, batch["digit"]) - noise) ** 2
            return jnp.mean(losses), losses

        gradients, losses = nnx.grad(loss_fn, has_aux=True)(self.model)
        gradients = armillary.all_reduce("mean", gradients)
        self.optimizer.update(self.model, gradients)
        self.loss.update(loss=losses)

        new = nnx.state(self.model, nnx.Param)
        old = nnx.state(self.average, nnx.Param)
        mixed = optax.incremental_update(new, old, step_size=STEP_SIZE)
        nnx.update(self.average, mixed)

    def train_loop_end(self) -> dict:
        return {"loss": self.loss.compute()}


@nnx.jit
def draw(model: Denoiser, digits: jax.Array, key: jax.Array) -> jax.Array:
    """Returns an image for each digit, of shape `(batch, 64)`, in -1 to 1."""
    betas, shares = make_schedule()
    start_key, key = jax.random.split(key)
    images = jax.random.normal(start_key, (len(digits), 64))

    def remove_noise(images: jax.Array, now: tuple) -> tuple:
        time, key = now
        noise = model(images, jnp.full(len(digits), time), digits)
        scale = betas[time] / jnp.sqrt(1.0 - shares[time])
        means = (images - scale * noise) / jnp.sqrt(1.0 - betas[time])
        fresh = jax.random.normal(key, images.shape) * jnp.sqrt(betas[time])
        return jnp.where(time > 0, means + fresh, means), None

    times = jnp.arange(NUM_TIMES)[::-1]
    keys = jax.random.split(key, NUM_TIMES)
    images, _ = jax.lax.scan(remove_noise, images, (times, keys))
    return images


def write_picture(path: Path, images: np.ndarray, *, scale: int = 4) -> None:
    """Writes images of shape `(rows, columns, height, width)` as a gray PNG."""
    # Values are 0 to 1. There is a gray line around each image.
    images = np.pad(images, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=0.3)
    rows, columns, height, width = images.shape
    grid = images.swapaxes(1, 2).reshape(rows * height, columns * width)
    pixels = (255 * np.clip(grid, 0.0, 1.0)).round().astype(np.uint8)
    pixels = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
    # The first byte of each line is the number of its filter: 0 for none.
    lines = np.pad(pixels, ((0, 0), (1, 0)))
    header = struct.pack(">2I5B", *pixels.shape[::-1], 8, 0, 0, 0, 0)
    chunks = [
        (b"IHDR", header),
        (b"IDAT", zlib.compress(lines.tobytes())),
        (b"IEND", b""),
    ]
    with path.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for kind, data in chunks:
            checksum = zlib.crc32(kind + data)
            file.write(struct.pack(">I", len(data)) + kind + data)
            file.write(struct.pack(">I", checksum))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws digits with a diffusion model.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/diffusion"))
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--steps-per-loop", type=int, default=500)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    strategy = armillary.MirroredStrategy()
    images, digits = load_digits(return_X_y=True)
    data = {
        "image": images.astype("float32") / 8.0 - 1.0,
        "digit": digits.astype("int32"),
    }
    source = armillary.data.from_arrays(
        data, batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
    )
    with strategy.scope():
        model = Denoiser(nnx.Rngs(0))
        average = nnx.clone(model)
        optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    trainer = Trainer(
        strategy.distribute_dataset(source), strategy, model, average, optimizer
    )
    controller = armillary.Controller(
        trainer=trainer,
        global_step=optimizer.step,
        strategy=strategy,
        steps_per_loop=options.steps_per_loop,
        summary_dir=options.run_dir / "train",
        checkpoint_manager=armillary.CheckpointManager(
            armillary.Checkpoint(trainer=trainer),
            options.run_dir / "checkpoints",
            checkpoint_interval=1000,
        ),
    )
    controller.train(options.steps)

    wanted = np.arange(10).repeat(16)
    samples = np.asarray(draw(average, jnp.array(wanted), jax.random.key(0)))
    path = options.run_dir / "samples.png"
    write_picture(path, (samples.reshape(10, 16, 8, 8) + 1.0) / 2.0)
    classifier = KNeighborsClassifier(3).fit(data["image"], data["digit"])
    print(f"The samples are in {path}")
    print(f"Recognized samples {classifier.score(samples, wanted):.2%}")


if __name__ == "__main__":
    main()
