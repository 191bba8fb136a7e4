"""Conversion of weights between Hugging Face folders, triweave's checkpoints and Megatron-Core's."""
