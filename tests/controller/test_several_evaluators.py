"""Tests of a controller with several evaluators, by name."""

import numpy as np

from armillary import AbstractEvaluator, Controller
from armillary.actions import EarlyStopping, NewBestMetric
from armillary.summary import read_metrics
from tests.controller.test_controller import Summaries, Trainer


class Losses(AbstractEvaluator):
    """Returns one loss after the other."""

    def __init__(self, *losses):
        self.losses = list(losses)

    def evaluate(self, num_steps):
        return {"loss": np.float32(self.losses.pop(0))}


def make_controller(*actions, validation=(3, 2, 1), test=(4, 5, 6), **options):
    trainer = Trainer()
    return Controller(
        trainer=trainer,
        evaluator={"validation": Losses(*validation), "test": Losses(*test)},
        global_step=trainer.step,
        steps_per_loop=4,
        eval_actions=actions,
        **options,
    )


def test_outputs_are_nested_and_logged_by_name(caplog):
    caplog.set_level("INFO", "armillary")
    outputs, summaries = [], Summaries()
    controller = make_controller(outputs.append, eval_summary_manager=summaries)

    output = controller.train_and_evaluate(8, eval_interval=4)

    assert outputs == [
        {"validation": {"loss": 3}, "test": {"loss": 4}},
        {"validation": {"loss": 2}, "test": {"loss": 5}},
    ]
    assert output == outputs[-1]
    lines = [line.split(" | ") for line in caplog.messages if " eval |" in line]
    assert [line[2] for line in lines] == 2 * [*2 * ["validation"], *2 * ["test"]]
    assert lines[3][-1] == "output: {'loss': 4.0}"
    assert summaries.written == [
        (4, {"validation": {"loss": 3}}),
        (4, {"test": {"loss": 4}}),
        (8, {"validation": {"loss": 2}}),
        (8, {"test": {"loss": 5}}),
    ]


def test_summaries_go_to_directories_of_these_names(tmp_path):
    make_controller(eval_summary_dir=tmp_path).evaluate()

    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["test", "validation"]
    records = [record for record in read_metrics(tmp_path) if "values" in record]
    assert [(each["name"], each["values"]) for each in records] == [
        ("validation", {"loss": 3}),
        ("test", {"loss": 4}),
    ]


def test_actions_look_at_one_of_them(tmp_path):
    best = NewBestMetric("validation/loss", higher_is_better=False)
    stopping = EarlyStopping(
        lambda reason: controller.request_stop(reason),
        "test/loss",
        patience=2,
        higher_is_better=False,
    )
    controller = make_controller(best, stopping)

    controller.train_and_evaluate(100, eval_interval=4)

    assert best.best_value == 1
    assert controller.trainer.step.get_value() == 12
    assert stopping.best_value == 4
