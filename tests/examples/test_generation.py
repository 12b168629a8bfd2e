"""Samples and answers do not depend on the devices, and samples come while training."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

import armillary
from tests.examples.loading import load_example
from tests.examples.running import read_steps, run_well
from tests.examples.strategies import SEVERAL, STRATEGIES

generation = load_example("generation")
decoding = load_example("decoding")
gpt = load_example("gpt")
multiple_choice = load_example("multiple_choice")

CHARACTERS = "\0abcdefgh"
PROMPTS = ("ab", "c", "hgfed")
MODEL = {"num_tokens": 9, "width": 16, "depth": 2, "remat": False}


class Writer:
    """A writer of summaries that keeps texts."""

    def __init__(self, directory):
        self.texts = []

    def text(self, tag, text, step):
        self.texts.append((tag, text, step))

    def scalar(self, tag, value, step):
        raise AssertionError(tag)

    def flush(self):
        pass

    def close(self):
        pass


@functools.cache
def make_trainer(name):
    """Returns a trainer that has trained two steps, and the structure of its model."""
    rng = np.random.default_rng(0)
    rows = gpt.pack([rng.integers(1, 9, size=100) for _ in range(32)])
    trainer, graph = gpt.make_trainer(STRATEGIES[name](), rows, MODEL, 4)
    trainer.train(2)
    return trainer, graph


def make_samples(name, manager=None, make=make_trainer, **options):
    trainer, graph = make(name)
    return generation.WriteSamples(
        trainer, graph, PROMPTS, CHARACTERS, manager, num_tokens=12, **options
    )


def test_prompts_are_encoded_with_padding_at_the_end():
    rows = generation.encode(PROMPTS, CHARACTERS)
    np.testing.assert_array_equal(rows["size"], [3, 2, 6])
    assert rows["tokens"].shape == (3, 6)
    np.testing.assert_array_equal(rows["tokens"][0], [0, 1, 2, 0, 0, 0])
    assert generation.decode(np.array([1, 2, 0, 3]), CHARACTERS) == "ab"


@pytest.mark.slow
@pytest.mark.parametrize("name", SEVERAL)
def test_any_devices_write_the_text_of_one_device(name):
    expected = make_samples("one device").generate()
    assert len(expected) == 3
    assert any(expected)
    assert make_samples(name).generate() == expected
    assert make_samples("one device", seed=1).generate() != expected


@pytest.mark.slow
def test_the_action_writes_each_text_once_for_each_interval(capsys, monkeypatch):
    num_traces = 0

    def count(*arguments):
        nonlocal num_traces
        num_traces += 1
        return decoding.generate(*arguments)

    monkeypatch.setattr(generation, "generate", count)
    writer = Writer(None)
    manager = armillary.summary.SummaryManager("run", writer_fn=lambda path: writer)
    samples = make_samples("one device", manager, make=make_trainer.__wrapped__)
    trainer = samples.trainer
    controller = armillary.Controller(
        trainer=trainer,
        global_step=trainer.global_step,
        steps_per_loop=1,
        train_actions=[armillary.actions.PeriodicAction(samples, 2)],
    )
    controller.train(6)
    assert [(tag, step) for tag, _, step in writer.texts] == [
        ("samples", 4),
        ("samples", 6),
    ]
    last = writer.texts[-1][1].splitlines()
    printed = capsys.readouterr().out.splitlines()
    assert last == [f"1. {line!r}" for line in printed[-3:]]
    for line, prompt, text in zip(
        printed[-3:], PROMPTS, samples.generate(), strict=True
    ):
        assert line == prompt + text
    assert num_traces == 1


def make_questions():
    """Returns questions with two to four choices of one to six tokens."""
    rng = np.random.default_rng(1)
    questions = []
    for number in range(11):
        choices = [
            rng.integers(1, 9, size=rng.integers(1, 7)).tolist()
            for _ in range(2 + number % 3)
        ]
        context = rng.integers(1, 9, size=3 + number % 4).tolist()
        answer = int(rng.integers(len(choices)))
        questions.append(multiple_choice.Question(context, choices, answer))
    return questions


def answer_one_by_one(model, questions):
    """Returns the shares of right answers, with a loop over choices and tokens."""
    run = nnx.jit(lambda model, *rows: nnx.log_softmax(model(*rows)))
    by_total = []
    by_mean = []
    for context, choices, answer in questions:
        totals = []
        for choice in choices:
            tokens = np.zeros(16, int)
            sequence = [gpt.EDGE, *context, *choice]
            tokens[: len(sequence)] = sequence
            rows = tokens[None], np.ones((1, 16), int), np.arange(16)[None]
            logs = np.asarray(run(model, *rows))[0]
            begin = 1 + len(context)
            places = range(begin, begin + len(choice))
            totals.append(sum(float(logs[i - 1, tokens[i]]) for i in places))
        means = [
            total / len(choice) for total, choice in zip(totals, choices, strict=True)
        ]
        by_total.append(totals.index(max(totals)) == answer)
        by_mean.append(means.index(max(means)) == answer)
    return {"accuracy": np.mean(by_total), "accuracy_norm": np.mean(by_mean)}


@functools.cache
def find_expected():
    trainer, graph = make_trainer("one device")
    model = nnx.merge(graph, jax.tree.map(np.asarray, trainer.state["parameters"]))
    return answer_one_by_one(model, make_questions())


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_questions_are_answered_as_one_by_one(name, monkeypatch):
    expected = find_expected()
    assert expected["accuracy"] != expected["accuracy_norm"]
    rows = multiple_choice.make_rows(make_questions())
    trainer, graph = make_trainer(name)
    # Batches of 5, 5 and 1 questions, which four replicas cannot share equally.
    monkeypatch.setattr(generation, "BATCH_SIZE", 5)
    evaluator = generation.make_evaluator(trainer, graph, rows)
    found = evaluator.evaluate(-1)
    assert found == pytest.approx(expected, rel=1e-6)


def test_the_right_choice_continues_its_context():
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 9, size=size) for size in (300, 200, 20, 400)]
    packed = gpt.pack(texts)
    questions = generation.make_questions(packed)
    assert len(questions) == 6
    whole = " ".join("".join(map(str, text)) for text in texts)
    for context, choices, answer in questions:
        assert len(choices) == 4
        texts_of_choices = ["".join(map(str, [*context, *each])) for each in choices]
        found = [text in whole for text in texts_of_choices]
        assert found == [place == answer for place in range(4)]


@pytest.mark.slow
def test_the_program_writes_samples_and_continues(tmp_path):
    arguments = ("--run-dir", tmp_path, "--width", 8, "--interval", 10, "--steps")
    first = run_well("generation.py", *arguments, 10, "--strategy", "mirrored")
    second = run_well("generation.py", *arguments, 20, "--strategy", "sharded")
    assert read_steps(second.stderr) == [20]
    pattern = r"(?m)^The .*$"
    before = re.findall(pattern, first.stdout)
    after = re.findall(pattern, second.stdout)
    assert len(before) == len(after) == 1
    assert before != after
    shares = re.findall(r"Test accuracy ([\d.]+)%", second.stdout)
    assert len(shares) == 2

    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    )
    events = accumulator.EventAccumulator(str(tmp_path / "train"))
    events.Reload()
    assert [event.step for event in events.Tensors("samples")] == [10, 20]
