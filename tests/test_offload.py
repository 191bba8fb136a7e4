"""Offload: the same bits as without it, the planner's bytes on the device and on the host, and a fault that is seen."""
