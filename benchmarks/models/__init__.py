"""The tasks' models in Flax NNX, from a batch to logits, as their users write them."""
