"""Sources of batches: arrays, files, other libraries, iterables."""
