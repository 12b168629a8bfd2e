"""Linear regression by an estimator: the Estimator example of TensorFlow's guide.

First as the guide has it, on one example that is repeated. Then on the 442 patients of
the diabetes data that come with scikit-learn: training and evaluation take turns, and a
second run with the same `--run-dir` goes on where the first one ended.

    python examples/linear_regressor_estimator.py --devices 2 --run-dir runs/regressor
"""

import argparse
from pathlib import Path

import jax
import numpy as np
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

import armillary
from armillary import estimator

NAMES = ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"]
BATCH_SIZE = 16


def run_guide(config: estimator.RunConfig) -> dict:
    """Returns what the example of the guide returns."""
    regressor = estimator.LinearRegressor(
        feature_columns=[estimator.numeric_column("feats")],
        optimizer="SGD",
        config=config,
    )

    def input_fn():
        # With tf.data: Dataset.from_tensors(({"feats": [1.0]}, [1.0]))
        #               .repeat(1000).batch(10)
        batch = {"feats": np.ones((10, 1), "float32")}, np.ones((10, 1), "float32")
        return [batch] * 100

    regressor.train(input_fn=input_fn, steps=10)
    return regressor.evaluate(input_fn=input_fn, steps=10)


def load_data() -> tuple[tuple, tuple]:
    """Returns features and labels of patients to train on, and of others."""
    x, y = (np.asarray(part) for part in load_diabetes(return_X_y=True))
    # The data come with a mean of 0, and sums of squares of 1.
    x = (x * np.sqrt(len(x))).astype("float32")
    y = (y[:, None] / 100).astype("float32")
    x, test_x, y, test_y = train_test_split(x, y, test_size=0.2, random_state=0)
    features, test_features = (
        dict(zip(NAMES, np.transpose(part), strict=True)) for part in (x, test_x)
    )
    return (features, y), (test_features, test_y)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains a linear regressor.")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/regressor"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)

    mirrored_strategy = armillary.MirroredStrategy(jax.devices("cpu"))
    config = estimator.RunConfig(
        train_distribute=mirrored_strategy,
        eval_distribute=mirrored_strategy,
        save_checkpoints_steps=100,
    )
    result = run_guide(config)
    print(f"The guide: average loss {result['average_loss']:.2e}")

    train, test = load_data()
    regressor = estimator.LinearRegressor(
        feature_columns=[estimator.numeric_column(name) for name in NAMES],
        model_dir=options.run_dir,
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
    print(f"The first patient: {first:.2f} predicted, {test[1][0, 0]:.2f} measured")


if __name__ == "__main__":
    main()
