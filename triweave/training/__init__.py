"""Training: one rank's part of the model, the step, the loop around it."""
