"""Tests of the BERT example: data, optimizer and runs."""

import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import armillary
from tests.examples.bert_reference import classify, make_arrays, write_model
from tests.examples.loading import load_example
from tests.examples.test_examples import run_well
from tests.records import make_record, write_records

bert_mrpc = load_example("bert_mrpc")
bert = load_example("bert.model")
mrpc = load_example("bert.mrpc")
OTHER_NAMES = load_example("bert.records").OTHER_NAMES

HEADER = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "dog", "##s", "sat", "ate"]
WORDS += list('",.')
SMALL = bert.BertConfig(
    num_layers=1,
    hidden_size=32,
    num_heads=2,
    vocabulary_size=len(WORDS),
    num_positions=16,
    dropout=0.0,
)


def write_corpus(folder: Path, num_train: int = 96, num_test: int = 30) -> Path:
    """Writes pairs that say the same if both are about one animal, and a model."""
    write_model(folder / "model.safetensors", make_arrays(SMALL))
    rng = np.random.default_rng(0)
    (folder / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    for split, num_pairs in {"train": num_train, "test": num_test}.items():
        lines = [HEADER]
        for a, b in rng.integers(0, 2, (num_pairs, 2)):
            animals = ("cat", "dog")
            first, second = f"The {animals[a]} sat.", f'"The {animals[b]}" ate.'
            lines.append(f"{int(a == b)}\t1\t2\t{first}\t{second}\r\n")
        path = folder / f"msr_paraphrase_{split}.txt"
        path.write_text("".join(lines), encoding="utf-8", newline="")
    return folder


def parse(folder: Path):
    arguments = ["--data-dir", folder, "--vocabulary", folder / "vocab.txt"]
    arguments += ["--pretrained", folder / "model.safetensors", "--max-length", 14]
    # The same for all tests, which then share their compiled programs.
    arguments += ["--batch-size", 16, "--learning-rate", 1e-3, "--steps-per-loop", 2]
    return bert_mrpc.parse_arguments([str(argument) for argument in arguments])


def make_controller(options, run_dir: Path, num_replicas: int):
    options.run_dir = run_dir
    strategy = armillary.MirroredStrategy(jax.devices("cpu")[:num_replicas])
    train, test = bert_mrpc.load_data(options)
    return bert_mrpc.make_controller(strategy, train, test, SMALL, options)


def read_model(controller) -> list[np.ndarray]:
    state = nnx.state(controller.trainer.model, nnx.Param)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def test_pairs_become_word_pieces(tmp_path):
    write_corpus(tmp_path)
    pairs = [("The CAT, sat.", 'Thé "bird" ate'), ("dogs ate " * 5, "the cat sat the")]
    found = mrpc.encode_pairs(pairs, tmp_path / "vocab.txt", max_length=14)
    number = {word: place for place, word in enumerate(WORDS)}

    def encode(tokens: str) -> list[int]:
        return [number[token] for token in tokens.split()]

    first = '[CLS] the cat , sat . [SEP] the " [UNK] " ate [SEP] [PAD]'
    # The longer one gives way.
    second = "[CLS] dog ##s ate dog ##s ate dog [SEP] the cat sat the [SEP]"
    np.testing.assert_array_equal(found["input_ids"], [*map(encode, (first, second))])
    np.testing.assert_array_equal(
        found["segment_ids"], [[0] * 7 + [1] * 6 + [0], [0] * 9 + [1] * 5]
    )
    np.testing.assert_array_equal(found["input_mask"], [[1] * 13 + [0], [1] * 14])
    assert {array.dtype.name for array in found.values()} == {"int32"}


def test_corpus_is_read_with_its_quotes(tmp_path):
    write_corpus(tmp_path, num_train=2)
    path = tmp_path / "msr_paraphrase_train.txt"
    pairs, labels = mrpc.read_pairs(path)
    assert [second[:5] for _, second in pairs] == ['"The ', '"The ']
    assert labels.dtype == np.int32
    assert list(labels) == [
        first.split()[1] == second.split()[1][:3] for first, second in pairs
    ]


def test_corpus_has_all_its_pairs(shared_data):
    for split, num_pairs in {"train": 4076, "test": 1725}.items():
        path = shared_data / "mrpc" / f"msr_paraphrase_{split}.txt"
        pairs, labels = mrpc.read_pairs(path)
        assert len(pairs) == len(labels) == num_pairs
        assert 0.66 < labels.mean() < 0.68
        assert all(first and second for first, second in pairs)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("sentence\tlabel\n", ["begins with the columns ['sentence', 'label']"]),
        (HEADER + "1\t2\t3\ta\tb\n1\t2\t3\ta\n", ["Line 3 of", "has 5 fields"]),
        (HEADER + "2\t2\t3\ta\tb\n", ["Line 2 of", "the first of which is 0 or 1"]),
    ],
)
def test_wrong_corpus_shows_the_line(tmp_path, content, parts):
    path = tmp_path / "msr_paraphrase_train.txt"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=".*".join(map(re.escape, parts))):
        mrpc.read_pairs(path)


def test_learning_rate_rises_and_falls_and_only_matrices_decay():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model.kernel[...], model.bias[...] = jnp.ones((2, 2)), jnp.ones(2)
    optimizer = bert_mrpc.make_optimizer(model, 0.1, num_steps=20)
    nothing = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
    update = nnx.jit(lambda optimizer, model: optimizer.update(model, nothing))
    rates = []
    for _ in range(20):
        before = float(model.kernel[0, 0])
        update(optimizer, model)
        # Without gradients, all that changes a matrix is that it decays.
        rates.append((1 - float(model.kernel[0, 0]) / before) / 0.01)
    falling = [0.1 * (18 - step) / 18 for step in range(18)]
    np.testing.assert_allclose(rates, [0.0, 0.05, *falling], atol=2e-5)
    np.testing.assert_array_equal(model.bias[...], 1.0)


@pytest.mark.slow
def test_evaluation_counts_every_pair_once(tmp_path):
    options = parse(write_corpus(tmp_path))
    test = bert_mrpc.load_data(options)[1].arrays
    labels = test.pop("label_ids")
    arrays = make_arrays(SMALL)
    logits = classify(arrays, SMALL, *test.values())
    # Half of the pairs are for one class, and half for the other.
    shift = np.median(np.unique((logits[:, 1] - logits[:, 0]).round(6)))
    logits[:, 1] -= shift
    arrays["output_bias"][1] -= shift
    write_model(options.pretrained, arrays)

    output = make_controller(options, tmp_path / "run", 2).evaluate(-1)
    predicted = logits.argmax(-1)
    right = (predicted & labels).sum()
    assert 0 < right < predicted.sum() < len(labels) == 30
    f1 = 2 * right / (predicted.sum() + labels.sum())
    assert output["f1"] == pytest.approx(f1)
    assert float(output["accuracy"]) == pytest.approx((predicted == labels).mean())
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    assert float(output["loss"]) == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.parametrize("other_names", [{}, OTHER_NAMES])
def test_tfrecords_give_the_batches_of_the_text(tmp_path, other_names):
    options = parse(write_corpus(tmp_path))
    expected = bert_mrpc.load_data(options)
    for source, name in zip(expected, ("MRPC_train", "MRPC_eval"), strict=True):
        rows = (
            {other_names.get(k, k): v[i] for k, v in source.arrays.items()}
            for i in range(source.num_examples)
        )
        write_records(tmp_path / f"{name}.tf_record", map(make_record, rows))
    options.tfrecords = tmp_path
    found = bert_mrpc.load_data(options)
    for source, same in zip(found, expected, strict=True):
        assert source.num_examples == same.num_examples
        # An epoch of the training data, which have no end, has six.
        for batch, wanted in itertools.islice(zip(source, same, strict=True), 7):
            for key, array in wanted.items():
                same_array = batch[other_names.get(key, key)]
                np.testing.assert_array_equal(same_array, array, strict=True)


@pytest.mark.slow
def test_program_overfits_a_few_real_pairs(tmp_path, shared_data):
    for split, num_copies in {"train": 20, "test": 1}.items():
        name = f"msr_paraphrase_{split}.txt"
        header, *lines = (shared_data / "mrpc" / name).read_text().splitlines()
        (tmp_path / name).write_text("\n".join([header, *lines[:12] * num_copies]))
    result = run_well(
        "bert_mrpc.py",
        *("--data-dir", tmp_path, "--run-dir", tmp_path / "run"),
        *("--vocabulary", shared_data / "bert" / "vocab.txt"),
        *("--devices", 1, "--max-length", 32, "--batch-size", 12, "--epochs", 2),
        *("--learning-rate", 1e-3, "--steps-per-loop", 10),
    )
    losses = re.findall(r"train \| step.*'loss': ([\d.]+)", result.stderr)
    assert len(losses) == 4
    assert float(losses[-1]) < 0.5 * float(losses[0])
    assert result.stderr.count("running complete evaluation") == 2
    assert re.search(r"Test accuracy [\d.]+%, F1 [\d.]+%", result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of the arguments --data-dir --tfrecords is required"),
        (["--data-dir", "."], "--data-dir needs --vocabulary, the vocab.txt of an"),
        (["--tfrecords", ".", "--max-length", "513"], "must be between 8 and 512"),
        (["--tfrecords", ".", "--epochs", "0"], "'0' is not a positive integer"),
    ],
)
def test_wrong_arguments_say_what_is_right(capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        bert_mrpc.parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_program_ends_with_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bert_mrpc.py", "--tfrecords", str(tmp_path)])
    with pytest.raises(SystemExit, match="has no file such as MRPC_train"):
        bert_mrpc.main()
