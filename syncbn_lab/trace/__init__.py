"""Watching a run: where an error was raised, and which tensors each function held.

Tracing knows nothing of batch norm: it is told which files to watch.
"""
