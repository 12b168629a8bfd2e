import io

import pytest

from benchmarks.contestants import CONTESTANTS, make_contestant
from benchmarks.protocol import Options, read_message, write_message
from benchmarks.tasks import Task
from benchmarks.worker import serve


class Recorder:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.bursts: list[int] = []

    def setup(self, task: Task, options: Options) -> None:
        raise AssertionError("`serve` sets nothing up")

    def run(self, num_steps: int) -> float:
        self.bursts.append(num_steps)
        return 2.5


def answers(requests: str) -> tuple[list[int], list[dict]]:
    replies, recorder = io.StringIO(), Recorder()
    serve(recorder, io.StringIO(requests), replies)
    lines = replies.getvalue().splitlines()
    return recorder.bursts, [read_message(line) for line in lines]


def test_worker_answers_each_run_with_its_steps_seconds_and_loss():
    bursts, replies = answers('{"run": 20}\n{"run": 40}\n')
    assert bursts == [20, 40]
    assert [reply["event"] for reply in replies] == ["ran", "ran"]
    assert [reply["steps"] for reply in replies] == [20, 40]
    assert all(reply["seconds"] >= 0 and reply["loss"] == 2.5 for reply in replies)
    assert all(reply["peak_bytes"] > 10**6 for reply in replies)


def test_worker_quits_when_it_is_asked_to():
    bursts, _ = answers('{"quit": true}\n{"run": 40}\n')
    assert bursts == []


@pytest.mark.parametrize("request_", ['{"run": 0}', '{"run": "9"}', '{"walk": 1}'])
def test_worker_refuses_what_is_no_request(request_):
    with pytest.raises(ValueError, match=r"`request` is .* positive number of steps"):
        answers(request_ + "\n")


@pytest.mark.parametrize("line", ["hello", "[1]", '{"run": '])
def test_a_line_that_is_no_message_is_an_error(line):
    with pytest.raises(ValueError, match=r"`line` is .* a message is (one|a) JSON"):
        read_message(line)


def test_messages_survive_the_line():
    stream = io.StringIO()
    message = {"event": "error", "message": "two\nlines", "skip": False}
    write_message(stream, message)
    assert stream.getvalue().count("\n") == 1
    assert read_message(stream.getvalue()) == message


def test_an_unknown_contestant_is_an_error():
    with pytest.raises(ValueError, match=r"`name` is 'nobody', but .* reference-scan"):
        make_contestant("nobody")


def test_every_contestant_names_a_module_and_a_class():
    assert all(target.count(":") == 1 for target in CONTESTANTS.values())
