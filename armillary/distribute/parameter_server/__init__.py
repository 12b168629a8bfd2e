"""Asynchronous training: variables on parameter servers, steps on workers, over Ray."""
