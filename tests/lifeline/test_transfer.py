"""Tests of the bytes of saves and restores in reports."""

import time

from armillary.lifeline._ending import Phase
from armillary.lifeline._lifeline import Lifeline
from armillary.lifeline._transfer import Transfer, count_bytes, find_transfers


def test_bytes_are_counted_with_the_bytes_of_another_library():
    others = 500
    transfer = Transfer("a phase", "written", 4000, lambda: others)

    with transfer.reported():
        transfer.add(1000)
        others = 700
        assert list(map(str, find_transfers("a phase"))) == ["1.2 kB of 4 kB written"]
        assert find_transfers("another phase") == []

    assert find_transfers("a phase") == []


def test_a_total_that_is_not_known_is_not_shown():
    assert str(Transfer("a phase", "read", 0)) == "0 B read"


def test_bytes_of_several_blocks_count_once():
    transfer = Transfer("some phase", "read", 300)

    with transfer.reported():
        transfer.add(100)
    with transfer.reported():
        transfer.add(100)
        assert count_bytes("some phase") == 200
    with Transfer("some phase", "read", 5).reported():
        assert count_bytes("some phase") == 200

    assert count_bytes("some phase") == 200


def test_a_report_has_the_bytes_of_its_phase_alone():
    lifeline = Lifeline()
    lifeline._between = lifeline._between._replace(find_phase=lambda: Phase("saving"))

    with (
        Transfer("saving", "written", 2000).reported(),
        Transfer("restoring", "read", 5000).reported(),
    ):
        report, _ = lifeline._report(time.monotonic())

    assert report.moved == "0 B of 2 kB written"


def test_bytes_count_as_progress():
    lifeline = Lifeline()
    lifeline._between = lifeline._between._replace(find_phase=lambda: Phase("saving"))
    transfer = Transfer("saving", "written", 2000)

    with transfer.reported():
        lifeline._report(100.0)
        still, _ = lifeline._report(130.0)
        transfer.add(1)
        moving, _ = lifeline._report(150.0)

    assert still.quiet_seconds == 30.0
    assert moving.quiet_seconds == 0.0
