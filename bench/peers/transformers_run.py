"""A rank of Hugging Face transformers with torch's FSDP2: what a user writes first.

`LlamaForCausalLM` with scaled-dot-product attention, `fully_shard` on each layer, bf16 through FSDP's mixed precision
(float32 masters, moments and gradient reductions), fused AdamW. Options: `recompute` (`none`, `layer`), `compile`
(`off`, `on`: each decoder layer by itself).
"""

from __future__ import annotations

from typing import Any

import stopwatch
import torch
import transformers
from session import measure_all, read_cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from workload import Case, shapes

from triweave.model_spec import ModelSpec


def hf_config(spec: ModelSpec) -> LlamaConfig:
    """The shape as transformers writes it."""
    return LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_hidden_layers,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        rms_norm_eps=spec.rms_norm_eps,
        max_position_embeddings=spec.max_position_embeddings,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )


def build(case: Case, device: torch.device) -> LlamaForCausalLM:
    """The model, sharded over all ranks before it takes any memory, with random weights."""
    config = hf_config(case.spec)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).float()
    mesh = init_device_mesh(device.type, (case.dp,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case.option("recompute", "none") == "layer":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in model.model.layers:
        if case.option("compile", "off") == "on":
            layer.compile()
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, config.initializer_range)
    # Computed when the module is built, so `to_empty` left it without its values.
    rotary = model.model.rotary_emb
    with device:
        model.model.rotary_emb = type(rotary)(config)
    return model.train()


def measure(case: Case) -> dict[str, Any]:
    """Build the model and time its steps."""
    shape, device = shapes()[case.shape], stopwatch.device()
    torch.manual_seed(stopwatch.rank())
    model = build(case, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    size = (case.micro_batch, shape.seq_len)
    tokens = [torch.randint(0, case.spec.vocab_size, size, device=device) for _ in range(case.num_micro_batches)]

    def step() -> float:
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for each in tokens:
            loss = model(input_ids=each, labels=each).loss / len(tokens)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(total)

    notes = f"transformers {transformers.__version__}, bf16 compute, float32 masters and moments"
    seconds, loss = stopwatch.time_steps(step)
    return stopwatch.result(seconds, notes, loss=loss)


def main() -> None:
    stopwatch.device()
    with stopwatch.world(read_cases()[0]):
        measure_all(measure)


if __name__ == "__main__":
    main()
