"""Resolvers of schedulers: the index of a process, their number, and the leader."""
