"""One rank of Megatron-Core: build its stages, load its shards, run its schedule, save its gradients."""

from __future__ import annotations

import datetime
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from contract import Batch, Layout, MicroBatch
from megatron_weights import Folder, Shape, shard, source

Fault = Literal["norm-gradients", "gate-up", "vocabulary-padding"]


@dataclass(frozen=True, slots=True)
class Llama:
    """A decoder in numbers, under Hugging Face's names."""

    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_factor: float | None
    """Llama 3.1's frequency scaling; None for plain rotary embeddings."""
    tie_word_embeddings: bool
    qkv_bias: bool

    def shape(self, layout: Layout) -> Shape:
        """The numbers that cutting its weights needs; the vocabulary is padded no further than `tp` requires."""
        return Shape(
            num_key_value_heads=self.num_key_value_heads,
            query_rows_per_group=self.num_attention_heads // self.num_key_value_heads * self.head_dim,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            padded_vocab_size=-(-self.vocab_size // layout.tp) * layout.tp,
        )


@dataclass(frozen=True, slots=True)
class Job:
    """What every rank of one run is told."""

    model_dir: Path
    llama: Llama
    layout: Layout
    batch: Batch
    folder: Path
    """Rendezvous, and where each rank leaves `rank-R.json` and `rank-R.safetensors`, or `rank-R.error`."""
    timeout: float
    """Seconds a collective may wait."""
    fault: Fault | None = None
    """A mistake to plant, to see the comparison find it."""


def run_rank(rank: int, job: Job) -> None:
    """Entry point of a spawned process; a failure is left in the folder as text."""
    try:
        _run(rank, job)
    except BaseException:
        (job.folder / f"rank-{rank}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _run(rank: int, job: Job) -> None:
    import megatron_cpu

    torch.set_num_threads(1)
    megatron_cpu.activate()
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    layout = job.layout
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=layout.world_size,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        create_gloo_process_groups=False,
    )
    if job.fault == "norm-gradients":
        module: Any = sys.modules["megatron.core.distributed.finalize_model_grads"]
        module._allreduce_non_tensor_model_parallel_grads = lambda *args: None
    chunks = _build(job)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="sgd", lr=0.0), chunks, use_gloo_process_groups=False)
    data_rank = parallel_state.get_data_parallel_rank()
    mine = job.batch.micro_batches[data_rank :: layout.dp]
    losses = get_forward_backward_func()(
        forward_step_func=_forward_step,
        data_iterator=[iter(mine) for _ in chunks] if layout.vpp > 1 else iter(mine),
        model=chunks if layout.vpp > 1 else chunks[0],
        num_microbatches=len(mine),
        seq_length=job.batch.shape[1],
        micro_batch_size=job.batch.shape[0],
        forward_only=False,
    )
    optimizer.prepare_grads()
    report = {
        "tp": parallel_state.get_tensor_model_parallel_rank(),
        "pp": parallel_state.get_pipeline_model_parallel_rank(),
        "dp": data_rank,
        "loss_sum": sum(losses),
        "grad_norm": float(optimizer.get_grad_norm()),
    }
    _save(rank, job, chunks, report)
    dist.barrier()
    dist.destroy_process_group()


def _build(job: Job) -> list[Any]:
    """This rank's model chunks, one for each virtual stage, with their weights, inside Megatron's own DDP."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    llama, layout = job.llama, job.layout
    config = _transformer_config(job)
    config.finalize_model_grads_func = finalize_model_grads
    folder = Folder(job.model_dir)
    chunks = []
    for stage in range(layout.vpp):
        vp_stage = stage if layout.vpp > 1 else None
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=llama.shape(layout).padded_vocab_size,
            max_sequence_length=job.batch.shape[1],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=last,
            share_embeddings_and_output_weights=llama.tie_word_embeddings,
            position_embedding_type="rope",
            rotary_base=llama.rope_theta,
            rope_scaling=llama.rope_factor is not None,
            rope_scaling_factor=llama.rope_factor or 1.0,
            vp_stage=vp_stage,
        )
        model.train()
        _load(model, job, folder)
        if last and job.fault != "vocabulary-padding":
            _exclude_padding(model, job)
        chunks.append(
            DistributedDataParallel(config, DistributedDataParallelConfig(), model, disable_bucketing=stage > 0)
        )
    return chunks


def _transformer_config(job: Job) -> Any:
    from megatron.core.transformer import TransformerConfig

    llama, layout = job.llama, job.layout
    return TransformerConfig(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        sequence_parallel=layout.splits_sequence,
        num_layers=llama.num_hidden_layers,
        hidden_size=llama.hidden_size,
        ffn_hidden_size=llama.intermediate_size,
        num_attention_heads=llama.num_attention_heads,
        num_query_groups=llama.num_key_value_heads,
        kv_channels=llama.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=llama.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=llama.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        # Gradients are divided by the valid tokens of the global batch, in finalize_model_grads.
        calculate_per_token_loss=True,
        # Every weight is loaded.
        perform_initialization=False,
        use_cpu_initialization=True,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        # The interleaved schedule overlaps nothing here, and gloo has no batched exchange for it.
        batch_p2p_comm=layout.vpp == 1,
    )


def _global_names(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a chunk, with the layer number of the whole model (from 0) in place of the chunk's own."""
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            local, _, rest = name.removeprefix("decoder.layers.").partition(".")
            # Megatron's own layer map, counted from 1.
            layer = model.decoder.layers[int(local)].layer_number - 1
            yield f"decoder.layers.{layer}.{rest}", parameter
        else:
            yield name, parameter


@torch.no_grad()
def _load(model: Any, job: Job, folder: Folder) -> None:
    from megatron.core import parallel_state

    shape, tp, rank = job.llama.shape(job.layout), job.layout.tp, parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in _global_names(model):
        origin = source(name, tied=job.llama.tie_word_embeddings)
        tensors = [folder[hf_name] for hf_name in origin.names]
        if job.fault == "gate-up" and len(tensors) == 2:
            piece = torch.cat(tensors).chunk(tp)[rank]
        else:
            piece = shard(origin.cut, tensors, shape, rank=rank, tp=tp)
        if parameter.shape != piece.shape:
            raise ValueError(f"{name}: Megatron holds {tuple(parameter.shape)}, the folder gives {tuple(piece.shape)}")
        parameter.copy_(piece)


def _exclude_padding(model: Any, job: Job) -> None:
    """Keep padded vocabulary rows out of the softmax.

    Megatron leaves them in, where a row of zeros adds exp(0) to the denominator of every token.
    """
    from megatron.core import parallel_state

    shape = job.llama.shape(job.layout)
    rows = shape.padded_vocab_size // job.layout.tp
    first = parallel_state.get_tensor_model_parallel_rank() * rows
    padding = torch.arange(first, first + rows) >= shape.vocab_size

    def hook(module: torch.nn.Module, inputs: object, output: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        logits, bias = output
        return logits.masked_fill(padding, torch.finfo(logits.dtype).min), bias

    if shape.padded_vocab_size > shape.vocab_size:
        model.output_layer.register_forward_hook(hook)


def _forward_step(micro_batches: Iterator[MicroBatch], model: Any) -> tuple[torch.Tensor, Any]:
    """What Megatron's schedules call for each micro-batch of each stage."""
    micro = next(micro_batches)
    positions = torch.arange(micro.tokens.shape[1]).expand_as(micro.tokens)
    output = model(micro.tokens, positions, None, labels=micro.targets.clamp(min=0))
    return output, partial(_summed_loss, micro.valid)


def _summed_loss(valid: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Summed loss, number of tokens in it, and what the schedule collects. `losses` is `[batch, seq]`."""
    total = (losses * valid).sum()
    return total, valid.sum().int(), total.item()


def _save(rank: int, job: Job, chunks: list[Any], report: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    parameters: list[tuple[str, Any]] = [pair for chunk in chunks for pair in _global_names(chunk.module)]
    gradients = {name: parameter.main_grad.contiguous() for name, parameter in parameters}
    save_file(gradients, job.folder / f"rank-{rank}.safetensors")
    (job.folder / f"rank-{rank}.json").write_text(json.dumps(report))
