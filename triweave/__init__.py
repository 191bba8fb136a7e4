"""triweave: plan, prove and run 3D-parallel training of Llama-family models."""

__version__ = "0.1.0"
