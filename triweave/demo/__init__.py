"""The demo: a real checkpoint, real questions, a real grid of processes, an answer before and after."""
