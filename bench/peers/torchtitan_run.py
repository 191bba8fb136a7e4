"""A rank of torchtitan: its own `Trainer`, command line and training loop, one after the other in one process.

What is ours goes in through the doors it has for that, a `TrainSpec` with the shape and with a data loader of random
tokens (no tokenizer and no data set is needed), and a metrics processor that also keeps the numbers it logs.

Under FSDP it computes in bf16 and keeps float32 masters. Its TP and PP without FSDP ignore the mixed-precision setting
and would compute in float32, so there it runs with `training.dtype bfloat16`: weights, moments and gradients in bf16,
no float32 master, which is less memory and less work than the other systems do.

Options: `recompute` (`none`, `op`, `layer`), `compile` (`on`, `off`), `schedule` (its own names).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import stopwatch
import torch
import torch.distributed as dist
from session import measure_all, read_cases
from workload import TIMED, WARM_UP, Case, shapes

RECOMPUTE = {"none": ["none"], "op": ["selective", "op"], "layer": ["full"]}


def arguments(case: Case) -> list[str]:
    """The command line of `torchtitan.train`."""
    shape, pipelined = shapes()[case.shape], case.pp > 1
    mode, *selective = RECOMPUTE[case.option("recompute", "none")]
    values = {
        "model.name": "bench",
        "model.flavor": case.shape,
        "training.seq_len": shape.seq_len,
        # A pipeline cuts its local batch into micro-batches; the others accumulate gradients up to the global batch.
        "training.local_batch_size": case.sequences if pipelined else case.micro_batch,
        "training.global_batch_size": case.sequences,
        "training.steps": WARM_UP + TIMED,
        "training.dtype": "float32" if case.dp > 1 else "bfloat16",
        "parallelism.data_parallel_shard_degree": case.dp,
        "parallelism.tensor_parallel_degree": case.tp,
        "parallelism.pipeline_parallel_degree": case.pp,
        "parallelism.pipeline_parallel_microbatch_size": case.micro_batch,
        "parallelism.pipeline_parallel_schedule": case.option("schedule", "1F1B"),
        "activation_checkpoint.mode": mode,
        "optimizer.lr": 1e-5,
        "lr_scheduler.warmup_steps": 2,
        "metrics.log_freq": 1,
        # A step of a large case takes longer than its default allows while kernels are still being compiled.
        "comm.train_timeout_seconds": 300,
    }
    if selective:
        values["activation_checkpoint.selective_ac_option"] = selective[0]
    words = [word for key, value in values.items() for word in (f"--{key}", str(value))]
    return [*words, "--compile.enable"] if case.option("compile", "on") == "on" else words


class RandomTokens:
    """A data loader of one batch, over and over: what torchtitan's own gives, `({"input": tokens}, labels)`."""

    def __init__(self, num_words: int, batch: int, seq_len: int) -> None:
        text = torch.randint(0, num_words, (batch, seq_len + 1))
        self.batch = (text[:, :-1].contiguous(), text[:, 1:].contiguous())

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            yield {"input": self.batch[0]}, self.batch[1]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to go on with."""


def train_spec(case: Case, kept: list[Any]) -> Any:
    """torchtitan's Llama 3 in the case's shape, with random tokens; what it logs by is put into `kept`."""
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec

    spec = case.spec
    # It derives the width of the MLP as 8/3 of the hidden size, rounded up to a multiple of this.
    if not spec.hidden_size * 8 // 3 <= spec.intermediate_size:
        raise SystemExit("torchtitan cannot be given an MLP narrower than 8/3 of the hidden size")
    model = TransformerModelArgs(
        dim=spec.hidden_size,
        n_layers=spec.num_hidden_layers,
        n_heads=spec.num_attention_heads,
        n_kv_heads=spec.num_key_value_heads,
        vocab_size=spec.vocab_size,
        multiple_of=spec.intermediate_size,
        rope_theta=spec.rope_theta,
    )

    class Recorder(MetricsProcessor):  # type: ignore[misc]
        """Keeps the step times and the peak that it is asked to log."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.seconds: list[float] = []
            self.loss: float | None = None
            self.peak_bytes = 0
            kept.append(self)

        def log(self, step: int, loss: float, *args: Any, **kwargs: Any) -> None:
            stopwatch.wait()
            self.seconds.append(time.perf_counter() - self.time_last_log)
            if torch.cuda.is_available():
                self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())
            self.loss = loss
            super().log(step, loss, *args, **kwargs)

    def loader(*, job_config: Any, **unused: Any) -> RandomTokens:
        return RandomTokens(case.num_words, job_config.training.local_batch_size, job_config.training.seq_len)

    def recorder(job_config: Any, parallel_dims: Any, model_args: Any = None, tag: Any = None) -> Recorder:
        return Recorder(job_config, parallel_dims, tag)

    return dataclasses.replace(
        get_train_spec(),
        model_args={case.shape: model},
        build_dataloader_fn=loader,
        build_tokenizer_fn=None,
        build_validator_fn=None,
        build_metrics_processor_fn=recorder,
    )


def measure(case: Case) -> dict[str, Any]:
    """Train as `torchtitan.train` does, and give what its metrics processor was told."""
    from torchtitan import train
    from torchtitan.config import ConfigManager
    from torchtitan.protocols import train_spec as registry

    kept: list[Any] = []
    # Its table of models refuses a second one of a name. Rank 0 sleeps for two seconds at the end of a run.
    awake = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    with (
        patch.dict(registry._extra_train_specs, {"bench": train_spec(case, kept)}),
        patch.object(train, "time", awake),
    ):
        trainer = train.Trainer(ConfigManager().parse_args(arguments(case)))
        trainer.train()
        trainer.close()
    (recorder,) = kept
    masters = "float32 masters and moments" if case.dp > 1 else "no float32 master, bf16 moments"
    notes = f"torchtitan {importlib.metadata.version('torchtitan')}, bf16 compute, {masters}"
    seconds = recorder.seconds[WARM_UP:]
    return stopwatch.result(seconds, notes, loss=recorder.loss, peak_bytes=recorder.peak_bytes)


def main() -> None:
    if not torch.cuda.is_available():
        import torchtitan_cpu

        torchtitan_cpu.activate()
    from torchtitan.tools.logging import init_logger

    init_logger()
    # Its process group stays for all cases, as do the meshes on it: results of DTensor's rules that it keeps name them.
    case = read_cases()[0]
    if case.is_alone:
        # It takes the group that is there.
        with stopwatch.world(case):
            measure_all(measure)
        return
    measure_all(measure)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
