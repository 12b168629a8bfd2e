"""What the attempts of a run add up to."""

import pytest

from armillary.goodput import Category, read_goodput
from armillary.goodput._goodput import add_up
from armillary.goodput._journal import Entry, Journal


class Attempt:
    """Makes the entries of one attempt; `spend` tells what it does."""

    def __init__(self, name, start, step):
        self.name, self.time, self.step = name, start, step
        self.seconds = {}
        self.entries = []
        self.spend(0.0)

    def spend(self, seconds, category=Category.STEPPING, step=None, is_done=False):
        self.seconds[category] = self.seconds.get(category, 0.0) + seconds
        self.time += seconds
        self.step = self.step if step is None else step
        self.entries.append(
            Entry(
                attempt=self.name,
                event="loop",
                time=self.time,
                step=self.step,
                is_done=is_done,
                seconds=dict(self.seconds),
            )
        )
        return self


def spent(goodput):
    return {str(name): value for name, value in goodput.seconds.items() if value}


def test_one_attempt():
    attempt = Attempt("a", 100.0, step=0)
    attempt.spend(2.0, Category.START_UP).spend(6.0, step=30)
    attempt.spend(2.0, Category.EVALUATING, is_done=True)

    goodput = add_up(attempt.entries)

    assert spent(goodput) == {"start_up": 2.0, "stepping": 6.0, "evaluating": 2.0}
    assert (goodput.total_seconds, goodput.goodput) == (10.0, 0.6)
    assert (goodput.num_attempts, goodput.num_steps) == (1, 30)
    assert goodput.num_lost_steps == 0


def test_what_a_killed_attempt_did_after_its_last_save_is_lost():
    first = Attempt("a", 100.0, step=0).spend(1.0, Category.START_UP)
    first.spend(10.0, step=20).spend(1.0, Category.SAVING)
    first.spend(4.0, step=27).spend(1.0, Category.DATA, step=28)
    second = Attempt("b", first.time + 7.0, step=20).spend(2.0, Category.START_UP)
    second.spend(5.0, step=40, is_done=True)

    goodput = add_up([*first.entries, *second.entries])

    assert spent(goodput) == {
        "start_up": 3.0,
        "stepping": 15.0,
        "saving": 1.0,
        "lost": 5.0,
        "down": 7.0,
    }
    assert (goodput.num_attempts, goodput.num_steps) == (2, 40)
    assert goodput.num_lost_steps == 8
    assert goodput.total_seconds == pytest.approx(second.time - 100.0)


def test_an_attempt_that_ran_no_step_loses_nothing_yet():
    first = Attempt("a", 0.0, step=0).spend(4.0, step=8)
    second = Attempt("b", first.time, step=5).spend(1.0, Category.START_UP)

    goodput = add_up([*first.entries, *second.entries])

    assert spent(goodput) == {"stepping": 4.0, "start_up": 1.0}
    assert (goodput.num_steps, goodput.num_lost_steps) == (8, 0)


def test_going_back_far_loses_several_attempts():
    one = Attempt("a", 0.0, step=0).spend(10.0, step=10).spend(10.0, step=20)
    two = Attempt("b", one.time, step=20).spend(10.0, step=30)
    three = Attempt("c", two.time, step=10).spend(10.0, step=20)

    goodput = add_up([*one.entries, *two.entries, *three.entries])

    assert spent(goodput) == {"stepping": 20.0, "lost": 20.0}
    assert (goodput.num_steps, goodput.num_lost_steps) == (20, 20)


def test_an_attempt_that_goes_back_loses_what_it_does_again():
    attempt = Attempt("a", 0.0, step=0).spend(10.0, step=10).spend(6.0, step=16)
    attempt.spend(1.0, Category.RESTORING, step=10).spend(3.0, step=14)

    goodput = add_up(attempt.entries)

    assert spent(goodput) == {"stepping": 13.0, "restoring": 1.0, "lost": 6.0}
    assert (goodput.num_steps, goodput.num_lost_steps) == (14, 6)


def test_going_back_to_look_at_a_state_loses_nothing():
    attempt = Attempt("a", 0.0, step=0).spend(10.0, step=10).spend(6.0, step=16)
    attempt.spend(1.0, Category.RESTORING, step=10).spend(1.0, Category.EVALUATING)

    assert add_up(attempt.entries).seconds[Category.LOST] == 0


def test_a_pause_after_the_end_of_training_is_no_time_of_the_run():
    first = Attempt("a", 0.0, step=0).spend(10.0, step=10, is_done=True)
    second = Attempt("b", first.time + 1e6, step=10).spend(10.0, step=20)

    assert add_up([*first.entries, *second.entries]).total_seconds == 20.0


def test_clocks_that_disagree_do_not_make_negative_time():
    first = Attempt("a", 100.0, step=0).spend(10.0, step=10)
    second = Attempt("b", 50.0, step=10).spend(10.0, step=20)

    assert spent(add_up([*first.entries, *second.entries])) == {"stepping": 20.0}


def test_nothing_has_no_goodput():
    assert add_up([]).goodput == 0.0


def write(directory, attempt):
    journal = Journal(directory)
    for entry in attempt.entries:
        journal.append(entry)


def test_a_run_is_found_in_its_directory_and_in_the_one_above(tmp_path):
    write(tmp_path / "run", Attempt("a", 0.0, step=0).spend(4.0, step=8))

    assert read_goodput(tmp_path / "run").num_steps == 8
    assert read_goodput(str(tmp_path)) == read_goodput(tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run", r"run', which does not exist, but it must"),
        ("file", r"file', which is a file, but it must be"),
        ("empty", r"there is no `goodput\.jsonl` in it or in"),
        (".", r"there are 2 runs, .*one', '.*two'\.$"),
    ],
)
def test_a_directory_that_is_not_that_of_a_run_is_an_error(name, message, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for run in ("one", "two"):
        write(tmp_path / run, Attempt("a", 0.0, step=0).spend(4.0, step=8))

    with pytest.raises(ValueError, match=message):
        read_goodput(tmp_path / name)
