"""Traces and compiles a step, and carries its state through the device program."""
