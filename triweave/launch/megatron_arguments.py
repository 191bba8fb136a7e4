"""The same plan in the arguments of Megatron-LM (Megatron-Core 0.19.2), and what of it those cannot say."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from triweave.cluster import Cluster
from triweave.config.validate import ResolvedRun
from triweave.errors import InputError, Problem
from triweave.layout import Layout
from triweave.model_spec import ModelSpec

DATA = "$DATA_PREFIX"
STEPS = "$TRAIN_STEPS"
START = "$START_CHECKPOINT"
SAVES = "$SAVE_FOLDER"
SHELL_VALUES = (DATA, STEPS, START, SAVES)
"""Values that the script's variables give: what a run file does not hold in Megatron's form."""

OFFLOAD_MODULES = ("qkv_linear", "core_attn", "attn_proj")
"""Whose inputs are what attention keeps."""

VOCAB_MULTIPLES = (128, 64, 32, 16, 8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Argument:
    """One option with its values."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    """Arguments of one subject, as the script shows them."""

    title: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, slots=True)
class Exported:
    """A run in Megatron's words."""

    groups: tuple[Group, ...]
    left_out: tuple[str, ...]
    """What is not there and why: it does nothing in this layout, or Megatron has no such thing."""

    @property
    def words(self) -> tuple[str, ...]:
        """All arguments as one list."""
        return tuple(
            word for group in self.groups for argument in group.arguments for word in (argument.name, *argument.values)
        )


def _argument(name: str, *values: object) -> Argument:
    return Argument(f"--{name}", tuple(f"{value:g}" if isinstance(value, float) else str(value) for value in values))


def export(resolved: ResolvedRun, cluster: Cluster) -> Exported:
    """The arguments of a run.

    Args:
        resolved: the run.
        cluster: its cluster.

    Raises:
        InputError: Megatron has no counterpart without which another model would come out, or need more memory.
    """
    left_out: list[str] = []
    layout = resolved.layout
    groups = {
        "PARALLEL": [*_grid(layout), *_stages(layout, left_out), *_data_parallel(resolved, left_out)],
        "MODEL": list(_model(resolved.spec, resolved.run.data.seq_len, layout.tp)),
        "ATTENTION": list(_attention(resolved, cluster)),
        "MEMORY": [*_recompute(layout, left_out), *_offload(layout, left_out)],
        "PRECISION": list(_precision(resolved)),
        "BATCH": [
            _argument("micro-batch-size", layout.micro_batch),
            _argument("global-batch-size", resolved.run.train.global_batch),
            # The mean over all trained tokens of a step, as here; otherwise a mean of means.
            _argument("calculate-per-token-loss"),
        ],
        "SCHEDULE": list(_schedule(resolved)),
        "DATA": list(_data(resolved)),
        "CHECKPOINTS": list(_checkpoints(resolved)),
        "LOG": list(_log(resolved)),
    }
    if layout.keeps_gathered:
        left_out.append("layout.keep_gathered: Megatron always gathers a second time in backward.")
    if layout.cuda_graphs:
        left_out.append("layout.cuda_graphs: Megatron's graphs (--cuda-graph-impl) ask for settings of their own.")
    shown = tuple(Group(name, tuple(arguments)) for name, arguments in groups.items() if arguments)
    return Exported(shown, tuple(left_out))


def _grid(layout: Layout) -> Iterator[Argument]:
    yield _argument("tensor-model-parallel-size", layout.tp)
    yield _argument("pipeline-model-parallel-size", layout.pp)
    if layout.cp > 1:
        yield _argument("context-parallel-size", layout.cp)
    if layout.uses_sequence_parallel:
        yield _argument("sequence-parallel")


def _stages(layout: Layout, left_out: list[str]) -> Iterator[Argument]:
    if layout.schedule in ("gpipe", "zero-bubble") and layout.pp > 1:
        left_out.append(
            f"layout.schedule: {layout.schedule}: Megatron has 1F1B and its interleaved form; this is 1F1B."
        )
    if len(set(layout.layers)) > 1:
        stages = [f"t*{layers}" for layers in layout.layers]
        yield _argument("pipeline-model-parallel-layout", f"E{'|'.join(stages)}L")
    elif layout.vpp > 1:
        yield _argument("num-virtual-stages-per-pipeline-rank", layout.vpp)


def _data_parallel(resolved: ResolvedRun, left_out: list[str]) -> Iterator[Argument]:
    layout, small_moments = resolved.layout, resolved.run.optimizer.moments == "bfloat16"
    if layout.replicas == 1:
        if small_moments:
            # Nobody is there to share states with, but --use-precision-aware-optimizer insists.
            yield _argument("use-distributed-optimizer")
        if layout.shard != "none":
            left_out.append(
                f"{'' if small_moments else '--use-distributed-optimizer, '}--overlap-grad-reduce,"
                " --overlap-param-gather: at DP 1 there is nobody to share the optimizer's states with, and nothing to"
                " reduce or gather."
            )
        return
    if small_moments and layout.shard == "none":
        rule = (
            "shares out no optimizer states, and Megatron-LM has moments in bfloat16 (optimizer.moments) under"
            " --use-precision-aware-optimizer alone, which needs --use-distributed-optimizer"
        )
        raise InputError(Problem("layout.shard", layout.shard, rule, "optimizer"))
    if layout.shard in ("gradients", "full"):
        strategy = "optim_grads" if layout.shard == "gradients" else "optim_grads_params"
        yield _argument("use-megatron-fsdp")
        yield _argument("data-parallel-sharding-strategy", strategy)
        yield _argument("no-gradient-accumulation-fusion")
    elif layout.shard == "optimizer":
        yield _argument("overlap-param-gather")
    if layout.shard != "none":
        yield _argument("use-distributed-optimizer")
    yield _argument("overlap-grad-reduce")
    if layout.uses_shard_groups:
        yield _argument("num-distributed-optimizer-instances", layout.replicas // layout.shard_ranks)


def _model(spec: ModelSpec, seq_len: int, tp: int) -> Iterator[Argument]:
    yield _argument("num-layers", spec.num_hidden_layers)
    yield _argument("hidden-size", spec.hidden_size)
    yield _argument("ffn-hidden-size", spec.intermediate_size)
    yield _argument("num-attention-heads", spec.num_attention_heads)
    yield _argument("kv-channels", spec.head_dim)
    if spec.num_key_value_heads != spec.num_attention_heads:
        # Without the first, Megatron takes no notice of the second.
        yield _argument("group-query-attention")
        yield _argument("num-query-groups", spec.num_key_value_heads)
    yield _argument("seq-length", seq_len)
    yield _argument("max-position-embeddings", spec.max_position_embeddings)
    yield _argument("position-embedding-type", "rope")
    yield _argument("rotary-base", int(spec.rope_theta))
    if spec.rope_scaling is not None:
        yield _argument("use-rope-scaling")
        yield _argument("rope-scaling-factor", spec.rope_scaling.factor)
    yield _argument("normalization", "RMSNorm")
    yield _argument("norm-epsilon", spec.rms_norm_eps)
    yield _argument("swiglu")
    yield _argument("disable-bias-linear")
    if spec.attention_bias:
        yield _argument("add-qkv-bias")
    if spec.qk_norm:
        yield _argument("qk-layernorm")
    if not spec.tie_word_embeddings:
        yield _argument("untie-embeddings-and-output-weights")
    yield _argument("attention-dropout", 0.0)
    yield _argument("hidden-dropout", 0.0)
    yield _argument("init-method-std", spec.initializer_range)
    multiple = next(one for one in VOCAB_MULTIPLES if spec.vocab_size % (one * tp) == 0 or one == 1)
    yield _argument("make-vocab-size-divisible-by", multiple)


def _attention(resolved: ResolvedRun, cluster: Cluster) -> Iterator[Argument]:
    # FlashAttention has no float32.
    fastest = "flash" if resolved.run.model.dtype == "bfloat16" else "auto"
    backends = {"auto": fastest, "flash": "flash", "cudnn": "fused", "efficient": "unfused", "math": "unfused"}
    backend = backends[resolved.run.model.attention]
    yield _argument("attention-backend", backend)
    if backend == "flash" and (version := flash_version(cluster.gpu.name)):
        yield _argument("flash-attention-version", version)


def flash_version(gpu: str) -> int | None:
    """The FlashAttention that a GPU is fastest with: 3 is for Hopper alone; None leaves it to Transformer Engine."""
    return 3 if gpu.startswith(("h100", "h200")) else 2 if gpu.startswith("a100") else None


def _recompute(layout: Layout, left_out: list[str]) -> Iterator[Argument]:
    if "layer" in layout.recompute:
        yield _argument("recompute-granularity", "full")
        yield _argument("recompute-method", "uniform")
        yield _argument("recompute-num-layers", 1)
        return
    modules = [theirs for ours, theirs in (("norm", "layernorm"), ("mlp", "mlp")) if ours in layout.recompute]
    if modules:
        yield _argument("recompute-granularity", "selective")
        yield _argument("recompute-modules", *modules)
    if "swiglu" in layout.recompute and "mlp" not in layout.recompute:
        left_out.append(
            "layout.recompute: swiglu: Megatron has no such thing; --recompute-modules mlp would compute the whole MLP"
            " again."
        )
    reason = "flash attention keeps no scores, so that there is nothing to be saved by computing them again."
    left_out.append(f"--recompute-modules core_attn: {reason}")


def _offload(layout: Layout, left_out: list[str]) -> Iterator[Argument]:
    if "attention" in layout.offload:
        yield _argument("fine-grained-activation-offloading")
        yield _argument("offload-modules", *OFFLOAD_MODULES)
        left_out.append(
            "NVTE_CPU_OFFLOAD_V1=1: --fine-grained-activation-offloading needs it from Transformer Engine 2.10 on."
        )
    if "mlp" in layout.offload:
        left_out.append("layout.offload: mlp: Megatron moves the MLPs of experts to the host, and no others.")
    if "layer" in layout.offload:
        left_out.append(
            "layout.offload: layer: Megatron's --cpu-offloading-num-layers goes with no pipeline and no recompute."
        )


def _precision(resolved: ResolvedRun) -> Iterator[Argument]:
    if resolved.run.model.dtype == "bfloat16":
        yield _argument("bf16")
    if resolved.run.model.fp8:
        yield _argument("fp8-format", "hybrid")
        yield _argument("fp8-recipe", "tensorwise")
    if resolved.run.optimizer.moments == "bfloat16":
        yield _argument("use-precision-aware-optimizer")
        yield _argument("exp-avg-dtype", "bf16")
        yield _argument("exp-avg-sq-dtype", "bf16")


def _schedule(resolved: ResolvedRun) -> Iterator[Argument]:
    optimizer, steps = resolved.run.optimizer, resolved.run.train.steps
    yield _argument("train-iters", STEPS if steps is None else steps)
    yield _argument("lr", optimizer.learning_rate)
    yield _argument("min-lr", optimizer.min_learning_rate)
    yield _argument("lr-decay-style", optimizer.lr_schedule)
    if optimizer.warmup_steps is not None:
        yield _argument("lr-warmup-iters", optimizer.warmup_steps)
    elif optimizer.warmup_ratio is not None:
        yield _argument("lr-warmup-fraction", optimizer.warmup_ratio)
    yield _argument("weight-decay", optimizer.weight_decay)
    yield _argument("adam-beta1", optimizer.betas[0])
    yield _argument("adam-beta2", optimizer.betas[1])
    yield _argument("adam-eps", optimizer.eps)
    yield _argument("clip-grad", optimizer.max_grad_norm)
    yield _argument("seed", resolved.run.seed)


def _data(resolved: ResolvedRun) -> Iterator[Argument]:
    run = resolved.run
    yield _argument("data-path", DATA)
    held_out = run.data.validation if isinstance(run.data.validation, float) else 0.0
    yield _argument("split", f"{100 * (1 - held_out):g},{100 * held_out:g},0")
    yield _argument("tokenizer-type", "HuggingFaceTokenizer")
    yield _argument("tokenizer-model", run.data.tokenizer or run.model.path)


def _checkpoints(resolved: ResolvedRun) -> Iterator[Argument]:
    run = resolved.run
    yield _argument("load", SAVES)
    yield _argument("save", SAVES)
    # Taken where --load holds none yet, and an error if it holds none either.
    yield _argument("pretrained-checkpoint", START)
    steps = STEPS if run.train.steps is None else run.train.steps
    yield _argument("save-interval", run.checkpoint.every_steps or steps)
    fsdp = resolved.layout.replicas > 1 and resolved.layout.shard in ("gradients", "full")
    yield _argument("ckpt-format", "fsdp_dtensor" if fsdp else "torch_dist")
    if run.checkpoint.asynchronous == "auto" and not fsdp:
        yield _argument("async-save")
        yield _argument("use-persistent-ckpt-worker")


def _log(resolved: ResolvedRun) -> Iterator[Argument]:
    run = resolved.run
    steps = STEPS if run.train.steps is None else run.train.steps
    yield _argument("log-interval", run.log.every_steps)
    yield _argument("log-throughput")
    yield _argument("eval-interval", run.validation.every_steps or steps)
    yield _argument("eval-iters", 0 if run.data.validation == 0 else run.validation.max_batches or 10)
    yield _argument("distributed-timeout-minutes", math.ceil(run.runtime.timeout_s / 60))
    if run.runtime.deterministic:
        yield _argument("deterministic-mode")
