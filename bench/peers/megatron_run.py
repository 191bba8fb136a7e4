"""A rank of Megatron-Core: its GPT model of local layers, its schedules, its DDP and distributed optimizer.

The layers are Megatron's *local* ones, since Transformer Engine and Apex are no plain wheels. Two parts of the local
layers would make the comparison a comparison with those packages' absence, and are replaced: the norm, whose fallback
refuses sequence parallelism, by torch's RMSNorm with Megatron's own mark on its weight; and the unfused attention,
which holds all scores, by torch's scaled-dot-product attention in the order of kernels that torchtitan takes (the
option `attention unfused` keeps Megatron's). Not available without those packages: fused weight-gradient accumulation,
fused rotary embeddings, user-buffer overlap of tensor parallelism.

bf16 compute, float32 masters, moments and gradient sums. Options: `schedule` (`1f1b`, `interleaved`), `attention`
(`sdpa`, `unfused`), `recompute` (`none`, `layer`).
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import stopwatch
import torch
import torch.nn.functional as F
from session import measure_all, read_cases
from torch.nn.attention import SDPBackend, sdpa_kernel
from workload import Case, shapes

KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def transformer_config(case: Case) -> Any:
    """Megatron's configuration of the case, with the overlaps and fusions that its local layers have."""
    from megatron.core.transformer import TransformerConfig

    spec, chunks, on_gpu = case.spec, _chunks(case), torch.cuda.is_available()
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        sequence_parallel=case.tp > 1,
        num_layers=spec.num_hidden_layers,
        hidden_size=spec.hidden_size,
        ffn_hidden_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_query_groups=spec.num_key_value_heads,
        kv_channels=spec.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=spec.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        autocast_dtype=torch.bfloat16,
        calculate_per_token_loss=True,
        # Made where they lie, by the runner: the weights' values do not matter here.
        perform_initialization=False,
        use_cpu_initialization=not on_gpu,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        cross_entropy_loss_fusion=on_gpu,
        deallocate_pipeline_outputs=True,
        # The interleaved schedule hides its exchanges; plain 1F1B has only batched ones.
        overlap_p2p_comm=chunks > 1 and on_gpu,
        batch_p2p_comm=chunks == 1,
        **(full if case.option("recompute", "none") == "layer" else {}),
    )


def _chunks(case: Case) -> int:
    """Virtual stages of one pipeline rank."""
    return 2 if case.option("schedule", "1f1b") == "interleaved" else 1


def local_layers(case: Case) -> Any:
    """Megatron's layer of local modules, with torch's norm and attention in it."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def norm(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **unused: Any) -> torch.nn.Module:
        module = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype, device=stopwatch.device())
        # By this mark its gradient is summed over the tensor-parallel group.
        module.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return module

    class FusedAttention(DotProductAttention):  # type: ignore[misc]
        """Megatron's local attention with a fused kernel in place of its matrix products and softmax."""

        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            # [seq, batch, heads, size] to [batch, heads, seq, size], and back.
            q, k, v = (each.permute(1, 2, 0, 3) for each in (query, key, value))
            with sdpa_kernel(KERNELS, set_priority=True):
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.size(1) != k.size(1))
            return out.permute(2, 0, 1, 3).reshape(query.size(0), query.size(1), -1)

    WrappedTorchNorm.__new__ = norm
    layers = get_gpt_layer_local_spec(normalization="RMSNorm")
    if case.option("attention", "sdpa") == "sdpa":
        layers.submodules.self_attention.submodules.core_attention = FusedAttention
    return layers


def build(case: Case, device: torch.device) -> list[Any]:
    """This rank's model chunks inside Megatron's DDP, with random weights."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.module import Float16Module

    shape, config, layers = shapes()[case.shape], transformer_config(case), local_layers(case)
    overlap = case.dp > 1
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        grad_reduce_in_fp32=True,
    )
    chunks = []
    for number in range(_chunks(case)):
        stage = number if _chunks(case) > 1 else None
        model = GPTModel(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=case.spec.vocab_size,
            max_sequence_length=shape.seq_len,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=int(case.spec.rope_theta),
            vp_stage=stage,
        ).to(device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, case.spec.initializer_range)
        chunk = Float16Module(config, model)
        chunks.append(DistributedDataParallel(config, wrapping, chunk, disable_bucketing=number > 0))
    config.finalize_model_grads_func = finalize_model_grads
    if overlap:
        config.no_sync_func = chunks[0].no_sync
    return chunks


def measure(case: Case) -> dict[str, Any]:
    """Build the model and its optimizer, and time steps of Megatron's schedule."""
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    shape, device = shapes()[case.shape], stopwatch.device()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=_chunks(case) if _chunks(case) > 1 else None,
        create_gloo_process_groups=False,
    )
    if device.type == "cuda":
        model_parallel_cuda_manual_seed(1234)
    chunks = build(case, device)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-5,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=case.dp > 1,
            clip_grad=1.0,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    size = (case.micro_batch, shape.seq_len)
    tokens = [torch.randint(0, case.num_words, size, device=device) for _ in range(case.num_micro_batches)]
    positions = torch.arange(shape.seq_len, device=device).expand(size)
    forward_backward = get_forward_backward_func()

    def step() -> float:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        told = forward_backward(
            forward_step_func=partial(_forward_step, positions),
            data_iterator=[cycle(tokens) for _ in chunks],
            model=chunks,
            num_microbatches=case.num_micro_batches,
            seq_length=shape.seq_len,
            micro_batch_size=case.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        # Only the last stage has any.
        return sum(float(each["loss"]) for each in told) / (len(tokens) * tokens[0].numel())

    version = importlib.metadata.version("megatron-core")
    attention = "torch's fused" if case.option("attention", "sdpa") == "sdpa" else "its unfused"
    notes = f"megatron-core {version}, local layers, {attention} attention, float32 masters, moments and gradients"
    seconds, loss = stopwatch.time_steps(step)
    parallel_state.destroy_model_parallel()
    stopwatch.end_subgroups()
    return stopwatch.result(seconds, notes, loss=loss)


def main() -> None:
    # Its tensor-parallel layers count on one queue of kernels to overlap a collective with a product.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    if stopwatch.device().type == "cpu":
        import megatron_cpu

        megatron_cpu.activate()
    with stopwatch.world(read_cases()[0]):
        measure_all(measure)


def _forward_step(positions: torch.Tensor, tokens: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedules call for each micro-batch of each stage."""
    each = next(tokens)
    return model(each, positions, None, labels=torch.roll(each, -1, 1)), _summed_loss


def _summed_loss(losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss, number of tokens in it, and what the schedule collects."""
    total = losses.float().sum()
    return total, torch.tensor(losses.numel(), dtype=torch.int, device=losses.device), {"loss": total.detach()}


if __name__ == "__main__":
    main()
