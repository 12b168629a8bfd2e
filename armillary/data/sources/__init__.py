"""Where batches come from: arrays, files, other libraries, iterables."""

__all__: list[str] = []
