"""What the processes tell each other between two loops, in one exchange.

There, several parts of the library must hear of the other processes: whether to stop,
whether a machine is going to be taken, whether all have the same data next. Each time
that one of them causes an exchange, all of them say something; the others find their
answers when they look for them::

    SaveCheckpointIfPreempted    exchange              before training goes on
    StopRequest                  take, or exchange     before the next loop
    Feed, Lockstep               take, or a round      before the next data

What was said before a loop, an evaluation or an action is out of date after it.

Two things have rounds of their own. Data that is not read when a loop ends, or that a
loop takes in its middle (a chunk; ten batches that each process reads for itself): to
wait for it would put off a stop. A save: what process 0 has done is known when it is
done.
"""

import itertools
import json
import weakref
from collections.abc import Callable
from typing import Any


class Boundary:
    """The last exchange between two loops. All processes call the same methods.

    Parts are known by a method that returns what this process has to say, for JSON;
    `None` is nothing. It is called in each exchange from its first use on, as long as
    its object lives.

    Args:
        gather: Returns a text of each process; see `Peers.gather`.

    Attributes:
        num_expired: How often something has run; what was said counts until the next.
    """

    def __init__(self, gather: Callable[[str, str], list[str]]) -> None:
        self._gather = gather
        # Numbered by first use, which is at the same point in all processes.
        self._counter = itertools.count()
        self._parts: dict[weakref.WeakMethod[Callable[[], Any]], str] = {}
        self._said: list[dict[str, Any]] = []
        self.num_expired = 0

    def exchange(self, topic: str, say: Callable[[], Any]) -> list[Any]:
        """Lets all parts speak; returns what each process says by `say`."""
        asked, own = self._number(say), {}
        for reference, number in list(self._parts.items()):
            if (speaker := reference()) is None:
                del self._parts[reference]
            else:
                own[number] = speaker()
        texts = self._gather(topic, json.dumps(own))
        self._said = [json.loads(text) for text in texts]
        return [said.pop(asked) for said in self._said]

    def take(self, say: Callable[[], Any]) -> list[Any] | None:
        """Returns, once, what each process said by `say` in the last exchange."""
        number = self._number(say)
        found = [said.pop(number, None) for said in self._said]
        return None if not found or None in found else found

    def expire(self) -> None:
        """Forgets what was said, because something has run since."""
        self._said = []
        self.num_expired += 1

    def _number(self, say: Callable[[], Any]) -> str:
        reference = weakref.WeakMethod(say)
        if reference not in self._parts:
            self._parts[reference] = str(next(self._counter))
        return self._parts[reference]
