"""What each of Megatron-LM's arguments is here: a key with its value, something that is so anyway, or in the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triweave.config.document import yaml_text

Given = Mapping[str, tuple[str, ...]]
Value = Callable[[tuple[str, ...], Given], str | None]
WORLD = "ranks of the launcher"
"""Where what is given holds the ranks that the script starts, if it says them."""


@dataclass(frozen=True, slots=True)
class Row:
    """How an argument becomes a key."""

    key: str
    value: Value
    """Its value as YAML, from the argument's own values and all that were given; None where it does nothing."""
    note: str = ""
    otherwise: str = ""
    """Why it does nothing, where it may."""


def _whole(values: tuple[str, ...], given: Given) -> str:
    return str(int(values[0]))


def _real(values: tuple[str, ...], given: Given) -> str:
    return yaml_text(float(values[0]))


def _text(values: tuple[str, ...], given: Given) -> str:
    return yaml_text(values[0])


def _is(word: str) -> Value:
    return lambda values, given: word


def _above_zero(values: tuple[str, ...], given: Given) -> str | None:
    return str(int(values[0])) if int(values[0]) > 0 else None


def _vpp(values: tuple[str, ...], given: Given) -> str:
    layers, pp = (int(given[name][0]) for name in ("--num-layers", "--pipeline-model-parallel-size"))
    return str(layers // pp // int(values[0]))


def _shard_group(values: tuple[str, ...], given: Given) -> str | None:
    """Ranks of data and context parallel divided by the instances; None of one instance, or of unknown ranks."""
    instances = int(values[0])
    if instances == 1 or WORLD not in given:
        return None
    axes = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
    tp, pp = (int(given.get(name, ("1",))[0]) for name in axes)
    return str(int(given[WORLD][0]) // (tp * pp) // instances)


def _layers(values: tuple[str, ...], given: Given) -> str:
    """`Et*21|t*20|t*20|t*19L`, `E(tt|)*3,tL` and the like: the layers of every stage.

    >>> _layers(("Ettt|(tt|)*2tL",), {})
    '[3, 2, 2, 1]'
    """
    text = values[0].replace(",", "")
    while match := re.search(r"\(([^()]*)\)\*(\d{1,4})", text):
        text = text[: match.start()] + match[1] * int(match[2]) + text[match.end() :]
    text = re.sub(r"(\w)\*(\d{1,4})", lambda match: match[1] * int(match[2]), text)
    if set(text) - set("EtL|"):
        raise ValueError(text)
    return yaml_text(tuple(stage.count("t") for stage in text.split("|")))


def _edges(values: tuple[str, ...], given: Given) -> str:
    """First and last stage given, the rest even."""
    layers, pp = (int(given[name][0]) for name in ("--num-layers", "--pipeline-model-parallel-size"))
    first, last = (given.get(f"--decoder-{one}-pipeline-num-layers") for one in ("first", "last"))
    rest = pp - bool(first) - bool(last)
    middle = (layers - int(first[0] if first else 0) - int(last[0] if last else 0)) // rest
    return yaml_text((*([int(first[0])] if first else []), *[middle] * rest, *([int(last[0])] if last else [])))


def _held_out(values: tuple[str, ...], given: Given) -> str:
    parts = [float(part) for part in values[0].split(",")]
    return yaml_text(round(parts[1] / sum(parts), 6) if len(parts) > 1 else 0.0)


def _steps(values: tuple[str, ...], given: Given) -> str:
    return str(int(values[0]) // int(given["--global-batch-size"][0]))


def _not_every_step(values: tuple[str, ...], given: Given) -> str:
    """An interval; as long as the run it means only at the end."""
    return "0" if given.get("--train-iters") == values else str(int(values[0]))


def _betas(given: Given) -> str:
    """Both at once; Megatron's own defaults for one that is not given."""
    beta1, beta2 = given.get("--adam-beta1", ("0.9",)), given.get("--adam-beta2", ("0.999",))
    return f"[{float(beta1[0])}, {float(beta2[0])}]"


def _modules(values: tuple[str, ...], given: Given) -> str | None:
    known = tuple(MODULES[one] for one in values if one in MODULES)
    return yaml_text(known) if known else None


BACKENDS = {"flash": "flash", "fused": "auto", "unfused": "math", "local": "math", "auto": "auto"}
"""Fused is cuDNN's, which has no kernel for packed documents; `auto` takes it for whole sequences."""
STRATEGIES = {"no_shard": "none", "optim": "optimizer", "optim_grads": "gradients", "optim_grads_params": "full"}
MODULES = {"layernorm": "norm", "mlp": "mlp"}
"""What selective recompute of Megatron is here; attention's scores are kept by no kernel of either."""
MOMENTS = {("fp32",): "float32", ("bf16",): "bfloat16"}
"""Values of both `--exp-avg-dtype` and `--exp-avg-sq-dtype` that `optimizer.moments` has."""

ROWS: dict[str, Row] = {
    "--tensor-model-parallel-size": Row("layout.tp", _whole),
    "--pipeline-model-parallel-size": Row("layout.pp", _whole),
    "--context-parallel-size": Row("layout.cp", _whole),
    "--sequence-parallel": Row("layout.sequence_parallel", _is("true")),
    "--num-virtual-stages-per-pipeline-rank": Row("layout.vpp", _whole),
    "--num-layers-per-virtual-pipeline-stage": Row("layout.vpp", _vpp, "virtual stages, not their layers"),
    "--pipeline-model-parallel-layout": Row("layout.layers", _layers),
    "--decoder-first-pipeline-num-layers": Row("layout.layers", _edges),
    "--decoder-last-pipeline-num-layers": Row("layout.layers", _edges),
    "--use-distributed-optimizer": Row("layout.shard", _is("optimizer")),
    "--use-torch-fsdp2": Row("layout.shard", _is("full")),
    "--use-megatron-fsdp": Row("layout.shard", _is("full"), "as --data-parallel-sharding-strategy says"),
    "--data-parallel-sharding-strategy": Row(
        "layout.shard",
        lambda values, given: STRATEGIES[values[0]] if "--use-megatron-fsdp" in given else None,
        otherwise="it is read with --use-megatron-fsdp only",
    ),
    "--num-distributed-optimizer-instances": Row(
        "layout.shard_group",
        _shard_group,
        "ranks of an instance, not instances",
        otherwise="one instance is all ranks; of more, layout.shard_group is dp x cp divided by them",
    ),
    "--micro-batch-size": Row("layout.micro_batch", _whole),
    "--global-batch-size": Row("train.global_batch", _whole),
    "--recompute-granularity": Row(
        "layout.recompute",
        lambda values, given: {"full": "[layer]", "selective": "[]"}[values[0]],
        "selective as --recompute-modules says",
    ),
    "--recompute-modules": Row(
        "layout.recompute",
        _modules,
        otherwise="flash attention keeps no scores to compute again",
    ),
    "--recompute-activations": Row(
        "layout.recompute", lambda values, given: None, otherwise="flash attention keeps no scores to compute again"
    ),
    "--fine-grained-activation-offloading": Row(
        "layout.offload", lambda values, given: None, otherwise="--offload-modules says what"
    ),
    "--offload-modules": Row(
        "layout.offload",
        lambda values, given: "[attention]" if "core_attn" in values else None,
        "with all that attention keeps",
        otherwise="a norm's or a projection's input does not go alone",
    ),
    "--cpu-offloading-num-layers": Row(
        "layout.offload", lambda values, given: "[layer]" if int(values[0]) else None, "in every layer"
    ),
    "--bf16": Row("model.dtype", _is("bfloat16")),
    "--fp8-format": Row("model.fp8", _is("true")),
    "--attention-backend": Row("model.attention", lambda values, given: BACKENDS[values[0].rpartition(".")[2]]),
    "--seq-length": Row("data.seq_len", _whole),
    "--split": Row("data.validation", _held_out),
    "--tokenizer-model": Row("model.path", _text, "the folder of a Hugging Face model"),
    "--lr": Row("optimizer.learning_rate", _real),
    "--min-lr": Row("optimizer.min_learning_rate", _real),
    "--lr-decay-style": Row("optimizer.lr_schedule", _text),
    "--lr-warmup-iters": Row("optimizer.warmup_steps", _whole),
    "--lr-warmup-fraction": Row("optimizer.warmup_ratio", _real),
    "--weight-decay": Row("optimizer.weight_decay", _real),
    "--adam-beta1": Row("optimizer.betas", lambda values, given: _betas(given)),
    "--adam-beta2": Row("optimizer.betas", lambda values, given: _betas(given)),
    "--adam-eps": Row("optimizer.eps", _real),
    "--clip-grad": Row("optimizer.max_grad_norm", _real),
    "--train-iters": Row("train.steps", _whole),
    "--train-samples": Row("train.steps", _steps, "divided by --global-batch-size"),
    "--seed": Row("seed", _whole),
    "--save": Row("output_dir", _text),
    "--save-interval": Row("checkpoint.every_steps", _not_every_step),
    "--async-save": Row("checkpoint.asynchronous", _is("auto")),
    "--eval-interval": Row("validation.every_steps", _not_every_step),
    "--eval-iters": Row("validation.max_batches", _above_zero, otherwise="nothing is measured in between"),
    "--log-interval": Row("log.every_steps", _whole),
    "--tensorboard-dir": Row("log.to", _is("[tensorboard]")),
    "--distributed-timeout-minutes": Row("runtime.timeout_s", lambda values, given: str(60 * int(values[0]))),
    "--deterministic-mode": Row("runtime.deterministic", _is("true")),
}
"""By argument."""

_OF_THE_MODEL = """
    num-layers hidden-size ffn-hidden-size num-attention-heads kv-channels group-query-attention
    num-query-groups max-position-embeddings position-embedding-type rotary-base rotary-percent
    use-rotary-position-embeddings no-position-embedding use-rope-scaling rope-scaling-factor normalization
    norm-epsilon swiglu disable-bias-linear add-qkv-bias qk-layernorm untie-embeddings-and-output-weights
    vocab-size make-vocab-size-divisible-by init-method-std vocab-file merge-file tokenizer-type
"""
FROM_THE_MODEL = frozenset(f"--{name}" for name in _OF_THE_MODEL.split())
"""Sizes and switches that a Hugging Face folder holds."""

_BECAUSE = {
    "it is always so here": """
        calculate-per-token-loss overlap-grad-reduce overlap-param-gather accumulate-allreduce-grads-in-fp32
        attention-softmax-in-fp32 cross-entropy-loss-fusion ckpt-fully-parallel-save
        ckpt-fully-parallel-load log-throughput tp-comm-overlap reset-position-ids
        reset-attention-mask distributed-backend use-persistent-ckpt-worker
    """,
    "Megatron itself takes no notice of it any more": """
        use-flash-attn use-mcore-models use-dist-ckpt dist-ckpt-format
    """,
    "kernels are chosen by the machine": """
        flash-attention-version transformer-impl no-masked-softmax-fusion no-bias-swiglu-fusion
        no-bias-gelu-fusion no-rope-fusion no-gradient-accumulation-fusion no-persist-layer-norm
        cross-entropy-fusion-impl fp8-recipe fp8-margin fp8-amax-history-len fp8-amax-compute-algo
        no-create-attention-mask-in-dataloader
    """,
    "layout.recompute: [layer] says both": """
        recompute-method recompute-num-layers
    """,
    "resume: auto does it, and a model folder is where a run begins": """
        load pretrained-checkpoint finetune exit-on-missing-checkpoint no-load-optim no-load-rng
        no-save-optim no-save-rng auto-detect-ckpt-format ckpt-format ckpt-assume-constant-structure
        use-checkpoint-args override-opt_param-scheduler
    """,
    "metrics.jsonl has it": """
        log-params-norm log-num-zeros-in-grad log-timers-to-tensorboard log-memory-to-tensorboard
        log-validation-ppl-to-tensorboard tensorboard-log-interval tensorboard-queue-size timing-log-level
        log-progress
    """,
    "data is prepared before the first step, see data.train": """
        data-path train-data-path valid-data-path test-data-path data-cache-path num-workers mock-data
        dataloader-type no-mmap-bin-files eod-mask-loss
    """,
    "optimizer.moments says it": """
        use-precision-aware-optimizer
    """,
    "the schedule ends with the run": """
        lr-decay-iters lr-decay-samples lr-warmup-init
    """,
    "nothing to be set": """
        manual-gc manual-gc-interval empty-unused-memory-level
    """,
}

ALWAYS = {f"--{name}": reason for reason, names in _BECAUSE.items() for name in names.split()}
"""Arguments that need no key, each with the reason."""

DEFAULTS = {
    "optimizer.betas": ("[0.9, 0.999]", ("--adam-beta1", "--adam-beta2")),
    "optimizer.weight_decay": ("0.01", ("--weight-decay",)),
    "optimizer.lr_schedule": ("linear", ("--lr-decay-style",)),
    "data.validation": ("0.03", ("--split",)),
    "seed": ("1234", ("--seed",)),
}
"""Where Megatron's default is not ours: the key, its value, and the arguments that would have given it."""
