"""What holds inside `strategy.run`: values, reductions, policies and proofs."""

__all__: list[str] = []
