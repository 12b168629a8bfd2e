"""Asynchronous training: variables on parameter servers, steps on workers, over Ray."""

__all__: list[str] = []
