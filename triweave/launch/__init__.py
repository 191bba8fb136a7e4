"""The files that start a run under torchrun, Slurm, Kubernetes, SkyPilot, Ray or Megatron-LM: texts from numbers."""
