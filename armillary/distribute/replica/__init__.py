"""The code inside `strategy.run`: values, reductions and policies of the state."""
