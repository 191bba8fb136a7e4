"""The part of the table of other tools' keys (`foreign_keys`) that says how a model is spread over ranks."""

from __future__ import annotations

from triweave.config import arithmetic
from triweave.config.foreign import Foreign

LAYOUT: tuple[Foreign, ...] = (
    Foreign(
        "layout.tp",
        "tensor_parallel_size (Axolotl and vLLM), tensor_model_parallel_size (Megatron-LM, LLaMA-Factory and "
        "ms-swift), tensor_parallel_degree (torchtitan), tensor_parallel_dim (torchtune), tp_size (HF Trainer and "
        "AutoModel), model_parallel_size (Megatron-LM)",
    ),
    Foreign(
        "layout.pp",
        "pipeline_parallel_size (vLLM and others), pipeline_model_parallel_size (Megatron-LM, LLaMA-Factory and "
        "ms-swift), pipeline_parallel_degree (torchtitan), pp_size (AutoModel)",
    ),
    Foreign(
        "layout.vpp",
        "virtual_pipeline_model_parallel_size (Megatron-LM, LLaMA-Factory and ms-swift), "
        "num_virtual_stages_per_pipeline_rank (Megatron-LM)",
        "virtual stages a pipeline rank holds; it needs layout.schedule: interleaved",
    ),
    Foreign(
        "layout.vpp",
        "num_layers_per_virtual_pipeline_stage (Megatron-LM), pipeline_parallel_layers_per_stage (torchtitan), "
        "layers_per_stage (AutoModel)",
        "virtual stages a pipeline rank holds, not their layers",
        work=arithmetic.layers_to_virtual_stages,
    ),
    Foreign(
        "layout.schedule",
        "pipeline_parallel_schedule (torchtitan), pp_schedule (AutoModel), pp_engine (nanotron)",
        "gpipe, 1f1b, interleaved or zero-bubble",
        {"1f1b": "1f1b", "afab": "gpipe", "gpipe": "gpipe", "interleaved1f1b": "interleaved"},
    ),
    Foreign(
        "layout.layers",
        "pipeline_model_parallel_layout (Megatron-LM), decoder_first_pipeline_num_layers (Megatron-LM and ms-swift), "
        "decoder_last_pipeline_num_layers (Megatron-LM and ms-swift), pipeline_parallel_first_stage_less_layers "
        "(torchtitan), pipeline_parallel_last_stage_less_layers (torchtitan)",
        "the layers of every stage in model order, as in [21, 20, 20, 19], or balanced",
    ),
    Foreign(
        "layout.cp",
        "context_parallel_size (Megatron-LM, Axolotl, ms-swift and nanotron), context_parallel_degree (torchtitan), "
        "context_parallel_dim (torchtune), cp_size (HF Trainer and AutoModel)",
        "ranks that split one sequence's attention",
    ),
    Foreign(
        "layout.cp",
        "sequence_parallel_size (ms-swift and Axolotl), sequence_parallel_degree (Axolotl), sp_size (HF Trainer), "
        "ulysses_sequence_parallel_size (verl)",
        "ranks that split one sequence's attention; these tools call that sequence parallel, which here is Megatron's "
        "splitting of activations, layout.sequence_parallel",
    ),
    Foreign(
        "layout.sequence_parallel",
        "sequence_parallel (Megatron-LM, and of Axolotl for another thing), enable_sequence_parallel (torchtitan), "
        "tp_mode (nanotron)",
        "activations split along the sequence between tensor-parallel products (Megatron's meaning); splitting one "
        "sequence's attention over ranks is layout.cp",
        {True: "true", False: "false", "reduce_scatter": "true", "all_reduce": "false"},
    ),
    Foreign(
        "layout.dp",
        "dp_size (AutoModel), data_parallel_size (Megatron-LM and vLLM), data_parallel_shard_degree (torchtitan), "
        "data_parallel_replicate_degree (torchtitan), data_parallel_shard_dim (torchtune), data_parallel_replicate_dim "
        "(torchtune), dp_shard_size (HF Trainer and Axolotl), dp_replicate_size (HF Trainer and Axolotl)",
        "the product of replicas and shards; left out, it is the ranks divided by tp x pp x cp",
        work=arithmetic.data_parallel,
    ),
    Foreign(
        "layout.shard",
        "fsdp (HF Trainer), fsdp_config (HF Trainer and Axolotl), deepspeed (HF Trainer, Axolotl and LLaMA-Factory), "
        "zero_stage (nanotron and DeepSpeed), use_distributed_optimizer (Megatron-LM and ms-swift)",
        "none, optimizer (ZeRO-1, Megatron's distributed optimizer), gradients (ZeRO-2) or full (ZeRO-3, FSDP)",
        {0: "none", 1: "optimizer", 2: "gradients", 3: "full", "full_shard": "full", "shard_grad_op": "gradients"},
    ),
    Foreign(
        "layout.shard",
        "fsdp_reshard_after_forward (torchtitan), reshard_after_forward (Axolotl)",
        "full gives parameters back after use, gradients keeps them",
        {True: "full", "always": "full", False: "gradients", "never": "gradients"},
    ),
    Foreign(
        "layout.shard_group",
        "num_distributed_optimizer_instances (Megatron-LM)",
        "ranks of an instance, not instances; left out, one instance",
        work=arithmetic.ranks_of_an_instance,
    ),
    Foreign(
        "layout.recompute",
        "gradient_checkpointing (HF Trainer, TRL, Axolotl and LLaMA-Factory), activation_checkpointing (HF Trainer and "
        "AutoModel), enable_activation_checkpointing (torchtune), activation_checkpoint (torchtitan), "
        "recompute_granularity (Megatron-LM, LLaMA-Factory and ms-swift), recompute_method (Megatron-LM), "
        "recompute_num_layers (Megatron-LM), recompute_modules (Megatron-LM), recompute_activations (Megatron-LM), "
        "recompute_layer (nanotron)",
        "what backward computes again: [layer] is full checkpointing, [swiglu] costs almost no time, [] is none",
        {True: "[layer]", False: "[]", "full": "[layer]", "selective": "[swiglu]"},
    ),
    Foreign(
        "layout.offload",
        "activation_offloading (TRL and Axolotl), enable_activation_offloading (torchtune), "
        "fine_grained_activation_offloading (Megatron-LM), offload_modules (Megatron-LM), cpu_offloading_num_layers "
        "(Megatron-LM)",
        "what waits in host memory: [attention, mlp] without recompute, [layer] beside recompute: [layer]",
        {True: "[attention, mlp]", False: "[]"},
    ),
    Foreign(
        "cluster",
        "nproc_per_node (torchrun), nnodes (torchrun), num_nodes (SkyPilot and Lightning), gpus_per_node (several "
        "launchers), num_machines (accelerate), num_processes (accelerate), devices (Lightning and litgpt)",
        "NODESxGPUSxGPU, as in 4x8xh100-80gb",
    ),
)
