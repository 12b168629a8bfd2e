"""Splits batches over replicas, reads them ahead, and stacks them into chunks."""
