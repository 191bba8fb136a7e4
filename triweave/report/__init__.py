"""One page of HTML from a run directory: what was said before the run, and what was measured. No torch, no network."""
