"""The run file: its keys, its strict loader, and the one function that validates a run."""
