"""The single-process answer: transformers in float32, one micro-batch at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from contract import IGNORED, Batch, Result


def transformers_result(model_dir: Path, batch: Batch) -> Result:
    """Loss and gradients of the Hugging Face model itself, eager attention, no parallelism."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.train()
    total = 0.0
    for micro in batch.micro_batches:
        logits = model(input_ids=micro.tokens, use_cache=False).logits
        summed = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), micro.targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        (summed / batch.valid_tokens).backward()
        total += summed.item()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    norm = torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()
    return {"loss": total / batch.valid_tokens, "grad_norm": float(norm), "gradients": gradients}
