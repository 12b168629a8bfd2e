"""The parts of `bert_mrpc.py`, one idea in each file."""
