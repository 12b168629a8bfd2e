"""Advice for arrays that are divided between processes, which JAX cannot read whole."""

_REFUSAL = "`jax.Array` that spans non-addressable"


def explain_partial_array(error: Exception) -> str | None:
    """Returns the advice for an error of JAX that a read of such an array raised."""
    if not isinstance(error, RuntimeError) or _REFUSAL not in str(error):
        return None
    return (
        "The array is divided between processes, and this process has a part of it. "
        "`strategy.gather(array, axis=0)` returns the whole array, in a call that all "
        "processes make. `array.addressable_shards` has the parts of this process."
    )
