"""The run file as frozen dataclasses.

The string under each field is its documentation: help, JSON schema, the reference page and the comments in
generated files are all made from it. Defaults are what a fine-tune of a Llama checkpoint wants.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from triweave.layout import Offload, Recompute, Schedule, Shard
from triweave.moments import MomentsDtype


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What is trained."""

    path: str
    """Hugging Face folder: config.json, safetensors weights and tokenizer.json."""
    weights: Literal["load", "random"] = "load"
    """`load` reads the folder's safetensors; `random` draws new weights (the folder needs only config.json)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of weights and activations. Master weights and gradient sums are float32 always."""
    fp8: bool = False
    """Multiply in fp8 inside the layers, forward and backward; needs a Hopper or Ada GPU, or a newer one."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Attention kernel on GPUs, named in the log; `auto`: the fastest. Packed documents: see data.md#packing."""


@dataclass(frozen=True, slots=True)
class LayoutConfig:
    """How the model is spread over the ranks: N = tp x pp x cp x dp."""

    tp: int = 1
    """Tensor parallel size. Must divide the attention heads; keep it inside a node."""
    pp: int = 1
    """Pipeline parallel size: number of pipeline ranks."""
    vpp: int = 1
    """Virtual stages a pipeline rank holds; more than 1 needs `schedule: interleaved`."""
    cp: int = 1
    """Context parallel size: ranks that share each sequence out, two slices a rank, where it does not fit else."""
    dp: int | None = None
    """Data parallel size; left out, it is the ranks divided by tp x pp x cp."""
    micro_batch: int = 1
    """Sequences a rank computes at once. Gradient accumulation follows: global_batch / (micro_batch x dp)."""
    sequence_parallel: bool = True
    """Split activations along the sequence between tensor-parallel products (Megatron's meaning of the word)."""
    keep_gathered: bool = False
    """Keep inputs that sequence parallelism gathers, and gather none again in backward: memory for time."""
    schedule: Schedule = "1f1b"
    """Order of the pipeline: gpipe, 1f1b, interleaved or zero-bubble."""
    shard: Shard = "optimizer"
    """What data-parallel ranks share out: none, optimizer (ZeRO-1), gradients (ZeRO-2) or full (ZeRO-3, FSDP)."""
    shard_group: int | None = None
    """Neighbouring ranks of dp x cp that `shard` splits among; left out, all of them. Fewer: HSDP."""
    recompute: tuple[Recompute, ...] = ()
    """What backward computes again instead of keeping: norm, swiglu, attention, mlp (swiglu included), layer (all)."""
    offload: tuple[Offload, ...] = ()
    """What waits in host memory from forward to backward: what attention or mlp keep, or a layer (input too)."""
    cuda_graphs: bool = False
    """Issue each pass of a layer as one CUDA graph: for micro-batches so small that the GPU waits for its host."""
    layers: Literal["even", "balanced"] | tuple[int, ...] = "even"
    """Layers of each (virtual) stage: `even`, `balanced` (weighs the head), or the numbers in model order."""
    tp_across_nodes: bool = False
    """Allow a tensor-parallel group to leave its node. It is slow; without this such a layout is refused."""


@dataclass(frozen=True, slots=True)
class DataConfig:
    """What it is trained on."""

    train: tuple[str, ...]
    """Training files (.jsonl, .json, .parquet, .txt) or folders of them; one path or a list."""
    validation: float | str = 0.01
    """Held-out data: a share of the examples (0 to turn off) or a path."""
    format: Literal["auto", "messages", "sharegpt", "prompt", "alpaca", "text", "tokens"] = "auto"
    """Record format; `auto` tells it from the keys of the first record."""
    seq_len: int = 4096
    """Tokens of one training sequence."""
    packing: bool = True
    """Put several examples into one sequence; attention and positions stay inside each example."""
    loss_on: Literal["assistant", "completion", "all"] = "assistant"
    """Tokens that are trained: what the assistant says, the last reply only, or everything. Text trains on all."""
    too_long: Literal["error", "truncate", "drop", "split"] = "error"
    """What happens to an example longer than seq_len. `split` cuts it into several sequences (text)."""
    tokenizer: str | None = None
    """Folder of tokenizer.json; left out, model.path."""
    chat_template: str | None = None
    """File with a Jinja chat template; left out, the tokenizer's own."""


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW with float32 master weights."""

    learning_rate: float = 1e-5
    """Peak learning rate."""
    min_learning_rate: float = 0.0
    """Learning rate at the end of the decay."""
    lr_schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after warm-up."""
    warmup_steps: int | None = None
    """Steps of linear warm-up; or give warmup_ratio."""
    warmup_ratio: float | None = None
    """Share of the run that is warm-up; or give warmup_steps."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices only: norms and biases are never decayed."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's decay rates of the two moments."""
    moments: MomentsDtype = "float32"
    """How both moments are stored. bfloat16 saves 4 bytes a parameter; betas then end at 0.984375."""
    eps: float = 1e-8
    """Added to Adam's denominator."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 turns clipping off (the norm is still reported)."""


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """How long, and how much a step holds."""

    global_batch: int = 128
    """Sequences of one optimizer step, over all data-parallel ranks and micro-batches."""
    epochs: float | None = None
    """Passes over the training data; or give steps."""
    steps: int | None = None
    """Optimizer steps; or give epochs."""
    on_not_finite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient is no number updates nothing: then `stop`, or `skip` to the next batch."""
    max_skipped_steps: int = 10
    """With `on_not_finite: skip`, the run ends when so many steps in a row were skipped."""
    on_spike: Literal["ignore", "warn", "stop"] = "warn"
    """When the loss rises spike_factor deviations above the median of the last 64 steps; `stop` ends before saving."""
    spike_factor: float = 10.0
    """Deviations (1.4826 x median absolute deviation, at least 1 % of the median) that make a spike."""
    compare_replicas_every: int = 100
    """Steps between comparisons, bit for bit, of what replicas must hold alike, also made before saves; 0: none."""


@dataclass(frozen=True, slots=True)
class ValidationConfig:
    """When the held-out data is measured. It is always measured before the first and after the last step."""

    every_steps: int = 0
    """Steps between measurements; 0 measures only at the start and the end."""
    max_batches: int | None = None
    """At most this many global batches a measurement; left out, all of the held-out data."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """What is kept on disk."""

    every_steps: int = 0
    """Steps between checkpoints; 0 saves only the last step."""
    keep: int = 3
    """Newest checkpoints to keep. Damaged ones do not count."""
    asynchronous: Literal["auto", "off"] = "auto"
    """Write beside training, from a copy in host memory: `auto` where every host has room for it (the log says)."""
    path: str | None = None
    """Folder, or URL that fsspec knows, as in s3://bucket/run; left out, output_dir/checkpoints."""
    hours_between_failures: float = 24.0
    """Mean hours between two ends of the run that nobody asked for: the run recommends every_steps by it."""
    export: bool = True
    """Write a Hugging Face folder (output_dir/hf) after the last step."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """What is told while it runs."""

    every_steps: int = 1
    """Steps between lines on the terminal; metrics.jsonl has a line for every step."""
    to: tuple[Literal["tensorboard"], ...] = ()
    """Further sinks beside metrics.jsonl."""


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """The processes."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where it runs: NCCL on GPUs, gloo on the CPU. `auto` takes GPUs when every rank can have one."""
    timeout_s: int = 600
    """Seconds that starting, loading, saving and exporting may take without progress before the run gives up."""
    hang_timeout_s: int = 300
    """Seconds without progress in a step or validation before the run says which rank hangs, and ends; 0: timeout_s."""
    max_starts_without_step: int = 5
    """Starts in a row without a new step after which a run is not started again; 0: no limit. See recovery.md."""
    overlap_tp: Literal["auto", "off"] = "auto"
    """Tensor-parallel communication behind products: `auto` where GPUs can copy from one another (the log says)."""
    overlap_dp: Literal["auto", "off"] = "auto"
    """Weights and gradients of replicas on one host copied from GPU to GPU, not by collectives, likewise."""
    deterministic: bool = False
    """Use only kernels whose result does not depend on timing, in train, verify and check; slower."""

    @property
    def collective_timeout_s(self) -> int:
        """Seconds after which a collective gives up: late enough for the watch to say first why it hangs."""
        return max(self.timeout_s, self.hang_timeout_s) + 30


@dataclass(frozen=True, slots=True)
class Run:
    """One training run, as its YAML file gives it."""

    model: ModelConfig
    data: DataConfig
    cluster: str | None = None
    """NODESxGPUSxGPU, as in 4x8xh100-80gb, or a cluster file (.yaml); left out, the ranks started on this machine."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    output_dir: str = "runs/run"
    """Folder of everything the run writes."""
    resume: str = "auto"
    """`auto` continues from the newest checkpoint in output_dir, `never` starts anew, or path or URL of one."""
    seed: int = 42
    """Seed of data order and of random weights. Results do not depend on the layout."""
