"""Checkpoint storage: slices of tensors in torch's distributed checkpoint and in Hugging Face's files."""
