"""How often `armillary-saving` saves: apart, because the parent imports no JAX."""

SAVE_INTERVAL = 100
