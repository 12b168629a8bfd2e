"""Where batches come from: arrays, files, other libraries, iterables."""
