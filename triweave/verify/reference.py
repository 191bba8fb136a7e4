"""What one process computes: `transformers`' own model on the same weights and the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from triweave.layers.cross_entropy import IGNORE
from triweave.layers.documents import Documents, block_causal_mask
from triweave.llama import StageInput
from triweave.model_spec import spec_from_folder

OBSERVED = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
"""Parts of a layer whose outputs are compared, in the order in which they compute."""


def observed_modules(num_layers: int) -> list[str]:
    """Names of the modules whose outputs are compared, in the order in which they compute."""
    layers = [f"model.layers.{n}.{part}" for n in range(num_layers) for part in OBSERVED]
    return ["model.embed_tokens", *layers, "model.norm", "lm_head"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One micro-batch of the global batch: what goes in and what is to be predicted."""

    inputs: StageInput
    targets: Tensor
    """`[seq, batch]`."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The loss of the global batch, and where the outputs and gradients lie."""

    loss: float
    file: Path

    def tensors(self) -> Any:
        """Open the file: `gradient.NAME` in the parameter's shape, `output.NAME.MICRO_BATCH` as `[batch, seq, ...]`."""
        return safe_open(self.file, framework="pt")


def compute_reference(
    folder: Path,
    samples: Sequence[Sample],
    file: Path,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Reference:
    """Run `transformers` over the global batch, micro-batch by micro-batch, and write what it gives to `file`.

    The loss is summed over the trained tokens and divided by their number in the whole batch, as in training.
    """
    model = load_transformers(folder, dtype).to(device)
    trained = sum(int((sample.targets != IGNORE).sum()) for sample in samples)
    num_layers = spec_from_folder(folder).num_hidden_layers
    kept: dict[str, Tensor] = {}
    loss = 0.0
    for number, sample in enumerate(samples):
        with _recording(model, num_layers, kept, number):
            logits = _forward(model, sample.inputs, device)
        targets = sample.targets.t().flatten().to(device)
        # In float64: torch's float32 log-softmax on the CPU is off by up to 2e-5 over 49,152 words, which is more
        # than what is to be shown here.
        part = cross_entropy(logits.double().flatten(0, 1), targets, ignore_index=IGNORE, reduction="sum")
        (part / trained).backward()
        loss += part.item() / trained
    for name, parameter in model.named_parameters():
        gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        kept[f"gradient.{name}"] = gradient.cpu().contiguous()
    save_file(kept, file)
    return Reference(loss, file)


def load_transformers(folder: Path, dtype: torch.dtype) -> nn.Module:
    """The folder's model as `transformers` loads it, from safetensors only and with no code of the folder's own."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", use_safetensors=True, local_files_only=True
    )
    # transformers gives the padding token's row no gradient. SmolLM2's padding token also ends every turn, so in a
    # fine-tune that row has a true gradient; it is what we compute and compare.
    model.get_submodule("model.embed_tokens").padding_idx = None  # type: ignore[assignment]
    return model


def _forward(model: nn.Module, inputs: StageInput, device: torch.device | None) -> Tensor:
    tokens, positions = inputs.tokens.t().to(device), inputs.positions.t().to(device)
    # Always given: without one, transformers takes positions that start again (padding) for another document.
    seq = tokens.shape[1]
    mask = torch.ones(1, 1, seq, seq, dtype=torch.bool, device=device).tril()
    if isinstance(inputs.documents, Documents):
        mask = block_causal_mask(inputs.documents).to(device)
    logits: Tensor = model(input_ids=tokens, position_ids=positions, attention_mask=mask, use_cache=False).logits
    return logits


@contextmanager
def _recording(model: nn.Module, num_layers: int, kept: dict[str, Tensor], micro_batch: int) -> Iterator[None]:
    modules = dict(model.named_modules())

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple) else output
            kept[f"output.{name}.{micro_batch}"] = value.detach().cpu().contiguous()

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in observed_modules(num_layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
