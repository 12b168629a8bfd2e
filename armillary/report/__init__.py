"""Reports of runs: an HTML page for one or several, and a table of many.

`armillary report RUN_DIR ...` writes the page, `armillary runs DIR` prints the table.
Both read the files of a `Controller`: `metrics.jsonl`, `goodput.jsonl` and its
checkpoints.
"""
