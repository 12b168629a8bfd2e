"""How batches reach a loop: split over replicas, read ahead, stacked into chunks."""
