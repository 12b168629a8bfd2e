"""What a run was, as one HTML page and as a line of a table.

`armillary report RUN_DIR ...` writes the page, `armillary runs DIR` prints the table.
Both read what a `Controller` has written: `metrics.jsonl`, `goodput.jsonl` and its
checkpoints.
"""
