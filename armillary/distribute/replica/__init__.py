"""What holds inside `strategy.run`: values, reductions, policies and proofs."""
