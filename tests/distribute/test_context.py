import threading

import numpy as np

import armillary
from armillary import DefaultStrategy


def test_threads_do_not_share_a_scope(make_mirrored):
    seen = []
    with make_mirrored(2).scope():
        thread = threading.Thread(target=lambda: seen.append(armillary.get_strategy()))
        thread.start()
        thread.join()
    assert seen == [DefaultStrategy()]


def test_two_threads_run_steps_at_once(make_mirrored):
    strategy = make_mirrored(2)
    results = {}

    def work(name):
        count = armillary.create_global_step()
        for _ in range(20):
            strategy.run(lambda: count.set_value(count[...] + 1))
        results[name] = int(np.asarray(count[...]))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"a": 20, "b": 20}
