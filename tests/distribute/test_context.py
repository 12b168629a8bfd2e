import threading

import armillary
from armillary import DefaultStrategy


def test_threads_do_not_share_a_scope(make_mirrored):
    seen = []
    with make_mirrored(2).scope():
        thread = threading.Thread(target=lambda: seen.append(armillary.get_strategy()))
        thread.start()
        thread.join()
    assert seen == [DefaultStrategy()]
