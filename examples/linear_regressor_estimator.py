"""Linear regression by an estimator, on the diabetes data of scikit-learn.

Training and evaluation take turns on 442 patients, and a second run with the same
`--run-dir` continues where the first one ended.

    python examples/linear_regressor_estimator.py --devices 2 --run-dir runs/regressor

It prints the average loss, about 0.35. A model that always predicts the mean has the
variance as its loss, about 0.51.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
import optax
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import armillary
from armillary import estimator

BATCH_SIZE = 16


def load_data() -> tuple[tuple, tuple]:
    """Returns features and labels of patients to train on, and of others."""
    x, y = (np.asarray(part) for part in load_diabetes(return_X_y=True))
    # The data come with a mean of 0, and sums of squares of 1.
    x = (x * np.sqrt(len(x))).astype("float32")
    y = (y / 100).astype("float32")
    x, test_x, y, test_y = train_test_split(x, y, test_size=0.2, random_state=0)
    return ({"x": x}, y), ({"x": test_x}, test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a linear regressor.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/regressor"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    mirrored_strategy = armillary.MirroredStrategy()
    config = estimator.RunConfig(
        train_distribute=mirrored_strategy,
        eval_distribute=mirrored_strategy,
        save_checkpoints_steps=100,
    )
    train, test = load_data()
    regressor = estimator.LinearRegressor(
        feature_columns=[estimator.numeric_column("x", shape=(10,))],
        model_dir=options.run_dir,
        optimizer=optax.sgd(0.02),
        config=config,
    )
    result, _ = estimator.train_and_evaluate(
        regressor,
        estimator.TrainSpec(
            # One batch of this size for each replica.
            lambda: armillary.data.from_arrays(
                train, batch_size=BATCH_SIZE, shuffle_seed=0, repeat=True
            ),
            max_steps=options.steps,
        ),
        estimator.EvalSpec(
            lambda: armillary.data.from_arrays(test, batch_size=BATCH_SIZE), steps=None
        ),
    )
    print(
        f"Diabetes: average loss {result['average_loss']:.4f} at step "
        f"{result['global_step']}, variance {np.var(test[1]):.4f}"
    )
    predictions = regressor.predict(
        lambda: armillary.data.from_arrays(test, batch_size=BATCH_SIZE)
    )
    first = next(predictions)["predictions"][0]
    print(f"The first patient: {first:.2f} predicted, {test[1][0]:.2f} measured")


if __name__ == "__main__":
    main()
