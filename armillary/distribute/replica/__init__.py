"""What holds inside `strategy.run`: values, collectives, policies, types and proofs."""

__all__: list[str] = []
