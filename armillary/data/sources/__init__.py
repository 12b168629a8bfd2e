"""Where batches come from: arrays, Grain, iterables."""

__all__: list[str] = []
