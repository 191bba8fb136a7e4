"""What the demo trains on: a real checkpoint and real questions, both from ordinary Python packages."""
