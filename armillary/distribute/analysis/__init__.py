"""Analyses of the program of one replica: is a step right on several replicas?

`_proof` decides whether a step is refused. The other analyses find mistakes to warn of.
Each follows facts about values through the program, by the rules of `_replica_dataflow`
and the classes of operations in `_operations`. Nothing here runs a step, or uses a
strategy.
"""
