"""Processes that are threads: the same code agrees, with a store in memory."""

import threading
from collections.abc import Callable
from typing import Any

import jax

from armillary.cluster._peers import Peers


class Store:
    """A key-value store like that of the coordination service."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_down = False
        self._changed = threading.Condition()

    def key_value_set(self, key: str, value: str) -> None:
        if self.is_down:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: no answer")
        with self._changed:
            if key in self.values:
                raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key}")
            if self.is_down:
                raise jax.errors.JaxRuntimeError("UNAVAILABLE: no answer")
            self.values[key] = value
            self._changed.notify_all()

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            for name in list(self.values):
                if name == key or name.startswith(f"{key}/"):
                    del self.values[name]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            return [
                (name, value)
                for name, value in self.values.items()
                if name.startswith(f"{key}/")
            ]

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        if self.is_down:
            raise jax.errors.JaxRuntimeError("UNAVAILABLE: no answer")
        with self._changed:
            if not self._changed.wait_for(
                lambda: key in self.values, timeout_in_ms / 1000
            ):
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: too late")
            return self.values[key]


def run_together(
    fn: Callable[[Peers], Any],
    count: int = 2,
    timeout_seconds: float = 10.0,
    store: Store | None = None,
) -> list[Any]:
    """Returns what `fn` returned, or raised, in each of so many processes."""
    store = store or Store()
    outcomes: list[Any] = [None] * count

    def run(index: int) -> None:
        try:
            outcomes[index] = fn(Peers(store, index, count, timeout_seconds))
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()
    return outcomes
