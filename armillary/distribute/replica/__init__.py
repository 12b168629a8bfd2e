"""The code inside `strategy.run`: values, reductions, policies and proofs."""
