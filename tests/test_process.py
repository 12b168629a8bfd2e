"""Tests that only the chief of several processes logs and writes, except warnings."""

import logging
from collections.abc import Iterator

import pytest

from armillary._logging import logger
from armillary._process import Process, get_process, set_process
from armillary.actions import NewBestMetric
from armillary.summary import SummaryManager


@pytest.fixture(params=[0, 1])
def process(request: pytest.FixtureRequest) -> Iterator[Process]:
    before = get_process()
    set_process(Process(request.param, 2))
    yield get_process()
    set_process(before)


def test_a_program_that_joins_nobody_is_the_chief():
    assert get_process() == Process(0, 1)
    assert get_process().is_chief


def test_only_warnings_come_from_all_processes(process):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        logger.info("step %d", 3)
        logger.warning("100%% of %s", "memory")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    warning = f"process {process.index} of 2: 100% of memory"
    assert messages == (["step 3", warning] if process.is_chief else [warning])


def test_only_the_chief_writes_files(process, tmp_path):
    summary = SummaryManager(tmp_path / "summary")
    summary.write_summaries({"loss": 1.0}, step=1)
    summary.close()
    best = NewBestMetric("loss", higher_is_better=False, directory=tmp_path / "best")
    assert best({"loss": 1.0})
    assert best.best_value == 1.0
    assert (tmp_path / "summary").exists() == process.is_chief
    assert (tmp_path / "best").exists() == process.is_chief
