"""How an evaluator learns that no checkpoint will follow: a file beside them.

It appears when the program that trains ends, if its last training ended well: a program
may train several times. It is taken away when a program begins to train again.
"""

import atexit
import json
import time

from armillary._logging import logger
from armillary._process import get_process

FILE_NAME = "DONE"

_texts: dict[str, str] = {}


def begin_training(directory: str | None) -> None:
    """Takes the file of an earlier training away.

    All processes call it, and the chief does it.
    """
    from etils import epath

    if directory is None or not get_process().is_chief:
        return
    _texts.pop(directory, None)
    path = epath.Path(directory) / FILE_NAME
    try:
        if path.is_file():
            path.unlink()
    except OSError as error:
        logger.warning(
            "`%s` cannot be removed (%s): an evaluator may end too early.", path, error
        )


def end_training(directory: str | None, step: int) -> None:
    """Lets the end of this program say that training is over, unless that goes on."""
    if directory is not None and get_process().is_chief:
        _texts[directory] = json.dumps({"step": step, "time": time.time()})


@atexit.register
def announce_ends() -> None:
    """Writes the files; the interpreter calls it when the program ends."""
    if not _texts:
        return
    from etils import epath

    for directory, text in _texts.items():
        path = epath.Path(directory) / FILE_NAME
        try:
            # A temporary directory may be gone by now.
            if path.parent.is_dir():
                path.write_text(text)
        except OSError as error:
            logger.warning(
                "`%s` cannot be written (%s): an evaluator may wait on.", path, error
            )


def read_end(directory: str | None) -> str | None:
    """Returns what the file says, another text for each training, or `None`."""
    from etils import epath

    if directory is None:
        return None
    try:
        return (epath.Path(directory) / FILE_NAME).read_text()
    except OSError:
        return None
