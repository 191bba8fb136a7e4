"""Runs that survive: stopping on request, hangs that are named, numbers that are no numbers, and where time went."""
