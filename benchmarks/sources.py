"""Measures the cost of each kind of source, compared with arrays in memory.

    python -m benchmarks.sources

Each source gives the same rows, as large as rows of MNIST, through a distributed
dataset on one device, and nothing is computed with them. One pass over each source
makes a round. The ratio compares a source with the arrays in the same round. A library
that is not installed is left out: `make libraries` makes an environment with all.

All rows are shuffled, except the rows of the Hugging Face stream, which would need a
buffer. No library gets workers, because the work for a row is compared.
"""

import importlib
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import armillary
from armillary.data.sources._message import example_class
from benchmarks.report import add_measurement, make_parser

_BATCH_SIZE = 256
_NUM_PARTS = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints."""
    parser = make_parser("sources", "Compares sources of data.")
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args(arguments)
    measurement = measure(given.rows, given.rounds)
    table = Table(title=f"Medians of {given.rounds} passes over {given.rows} rows")
    for title in ("source", "rows/s", "beside arrays (quartiles)"):
        table.add_column(title, justify="left" if title == "source" else "right")
    for name, found in measurement["sources"].items():
        low, high = found["ratio_quartiles"]
        ratio = f"{found['ratio']:.2f} ({low:.2f} to {high:.2f})"
        table.add_row(name, f"{found['rows_per_second']:,.0f}", ratio)
    Console().print(table)
    add_measurement(given.json, "sources", measurement)


def measure(num_rows: int, num_rounds: int) -> dict[str, Any]:
    """Returns the rows per second of each source, and the ratio to arrays in memory.

    Args:
        num_rows: Rows in one pass.
        num_rounds: Passes over each source that count, at least 2; one more before
            them warms up.
    """
    generator = np.random.default_rng(0)
    rows = {
        "image": generator.integers(0, 256, (num_rows, 784), np.uint8),
        "label": generator.integers(0, 10, num_rows, np.int32),
    }
    strategy = armillary.OneDeviceStrategy("cpu:0")
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        made = {
            name: strategy.distribute_dataset(make(rows, Path(folder)))
            for name, (library, make) in _SOURCES.items()
            if library is None or importlib.util.find_spec(library)
        }
        for _ in range(num_rounds + 1):
            for name, dataset in made.items():
                seconds.setdefault(name, []).append(_time_pass(dataset, num_rows))
    rates = {name: [num_rows / each for each in s[1:]] for name, s in seconds.items()}
    return {
        "rows": num_rows,
        "batch_size": _BATCH_SIZE,
        "sources": {
            name: _summarize(rate, rates["arrays"]) for name, rate in rates.items()
        },
    }


def _time_pass(dataset: Any, num_rows: int) -> float:
    """Returns the seconds of one pass, to the last batch on the device."""
    begin, seen = time.perf_counter(), 0
    for batch in dataset:
        seen += len(jax.block_until_ready(batch)["label"])
    seconds = time.perf_counter() - begin
    if seen != num_rows:
        raise RuntimeError(f"The source gave {seen} of {num_rows} rows.")
    return seconds


def _summarize(rates: list[float], arrays: list[float]) -> dict[str, Any]:
    ratios = [rate / array for rate, array in zip(rates, arrays, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return {
        "rows_per_second": statistics.median(rates),
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [low, high],
    }


def _make_arrays(rows: dict[str, np.ndarray], folder: Path) -> Any:
    return armillary.data.from_arrays(rows, batch_size=_BATCH_SIZE, shuffle_seed=0)


def _make_tfrecords(rows: dict[str, np.ndarray], folder: Path) -> Any:
    paths = []
    for part in range(_NUM_PARTS):
        own = {name: array[part::_NUM_PARTS] for name, array in rows.items()}
        paths.append(_write_records(folder / f"part-{part}.tfrecord", own))
    features = {
        "image": armillary.data.FixedLenFeature((784,), np.uint8),
        "label": armillary.data.FixedLenFeature((), np.int32),
    }
    return armillary.data.from_tfrecords(
        paths, features, batch_size=_BATCH_SIZE, shuffle_seed=0
    )


def _write_records(path: Path, rows: dict[str, np.ndarray]) -> Path:
    from tensorboardX.record_writer import RecordWriter

    writer = RecordWriter(str(path))
    for image, label in zip(rows["image"], rows["label"], strict=True):
        example = example_class()()
        features = example.features.feature
        features["image"].bytes_list.value.append(image.tobytes())
        features["label"].int64_list.value.append(int(label))
        writer.write(example.SerializeToString())
    writer.close()
    return path


def _make_grain(rows: dict[str, np.ndarray], folder: Path) -> Any:
    import grain

    def take(index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in rows.items()}

    numbers = grain.MapDataset.range(len(rows["label"]))
    return numbers.shuffle(seed=0).map(take).batch(_BATCH_SIZE)


def _make_grain_unthreaded(rows: dict[str, np.ndarray], folder: Path) -> Any:
    import grain

    return _make_grain(rows, folder).to_iter_dataset(grain.ReadOptions(num_threads=0))


def _make_tf_data(rows: dict[str, np.ndarray], folder: Path) -> Any:
    tf = importlib.import_module("tensorflow")

    dataset = tf.data.Dataset.from_tensor_slices(rows)
    return dataset.shuffle(len(rows["label"]), seed=0).batch(_BATCH_SIZE).prefetch(2)


def _make_torch(rows: dict[str, np.ndarray], folder: Path) -> Any:
    torch: Any = importlib.import_module("torch")

    tensors = {name: torch.from_numpy(array) for name, array in rows.items()}

    class Rows(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(tensors["label"])

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {name: tensor[index] for name, tensor in tensors.items()}

    return torch.utils.data.DataLoader(Rows(), _BATCH_SIZE, shuffle=True)


def _make_hugging_face(rows: dict[str, np.ndarray]) -> Any:
    datasets = importlib.import_module("datasets")

    features = {
        "image": datasets.List(datasets.Value("uint8"), length=784),
        "label": datasets.Value("int32"),
    }
    return datasets.Dataset.from_dict(rows, features=datasets.Features(features))


def _make_dataset(rows: dict[str, np.ndarray], folder: Path) -> Any:
    return armillary.data.from_huggingface(
        _make_hugging_face(rows), batch_size=_BATCH_SIZE, shuffle_seed=0
    )


def _make_stream(rows: dict[str, np.ndarray], folder: Path) -> Any:
    stream = _make_hugging_face(rows).to_iterable_dataset()
    return stream.with_format("numpy").batch(_BATCH_SIZE)


_Make = Callable[[dict[str, np.ndarray], Path], Any]

# The library that must be there, and what makes the source.
_SOURCES: dict[str, tuple[str | None, _Make]] = {
    "arrays": (None, _make_arrays),
    "TFRecord files": (None, _make_tfrecords),
    "grain.MapDataset": (None, _make_grain),
    "the same, num_threads=0": (None, _make_grain_unthreaded),
    "tf.data.Dataset": ("tensorflow", _make_tf_data),
    "torch DataLoader": ("torch", _make_torch),
    "Hugging Face Dataset": ("datasets", _make_dataset),
    "Hugging Face IterableDataset": ("datasets", _make_stream),
}


if __name__ == "__main__":
    main()
