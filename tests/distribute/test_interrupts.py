import signal
import threading

import pytest

from armillary.distribute import uninterrupted


def test_an_interrupt_waits_until_the_block_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done


def test_the_handler_is_the_old_one_afterwards():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="from the block"), uninterrupted():
        raise ValueError("from the block")
    assert signal.getsignal(signal.SIGINT) is before


def test_another_thread_is_left_alone():
    seen = []

    def run() -> None:
        with uninterrupted():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
