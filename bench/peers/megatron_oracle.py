"""Loss and gradients of a Hugging Face Llama, computed by Megatron-Core on CPU processes.

python bench/peers/megatron_oracle.py --model HF_DIR --batch batch.json --tp 2 --pp 2 --out result.json
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from contract import IGNORED, Batch, Layout, Result, difference
from megatron_cpu import VERSION
from megatron_rank import Fault, Job, Llama, run_rank
from megatron_weights import Cut, source, unshard
from safetensors.torch import load_file, save_file

LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 1e-4
"""Relative; both systems compute in float32, so they differ by the order of their sums."""


class OracleError(Exception):
    """The model, the batch or the layout is not one that Megatron can run, or a rank failed."""


class MegatronResult(Result):
    """A result, and what only a system of several ranks can tell."""

    replica_difference: float
    """Largest absolute difference between copies of one gradient: a norm's over the tensor-parallel group, a tied
    embedding's on the first and last stage, and every one's over the data-parallel group."""


def read_llama(model_dir: Path) -> Llama:
    """The numbers of a Hugging Face folder, as transformers itself reads them.

    Raises:
        OracleError: there is no config.json, or Megatron's GPT model has no counterpart of what it describes.
    """
    from transformers import AutoConfig

    if not (model_dir / "config.json").is_file():
        raise OracleError(f"{model_dir}: no config.json")
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    rope = config.rope_parameters
    problems = []
    if config.model_type not in ("llama", "qwen2"):
        problems.append(f"model_type is {config.model_type}: llama or qwen2")
    if config.hidden_act != "silu" or getattr(config, "mlp_bias", False) or getattr(config, "attention_bias", False):
        problems.append("SwiGLU without biases, but for Qwen2's on query, key and value, is supported")
    if getattr(config, "use_sliding_window", False):
        problems.append("attention is full: use_sliding_window must be false")
    # Megatron writes these three of Llama 3.1's four numbers into its code.
    fixed = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
    if rope["rope_type"] not in ("default", "llama3"):
        problems.append(f"rope_type is {rope['rope_type']}: default or llama3")
    elif rope["rope_type"] == "llama3" and any(rope[key] != value for key, value in fixed.items()):
        problems.append(f"rope_type llama3 must have {fixed}")
    if problems:
        raise OracleError(f"{model_dir}: " + "; ".join(problems))
    return Llama(
        **{name: getattr(config, name) for name in ("num_hidden_layers", "hidden_size", "intermediate_size")},
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        rope_theta=rope["rope_theta"],
        rope_factor=rope["factor"] if rope["rope_type"] == "llama3" else None,
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=config.model_type == "qwen2",
    )


def check(llama: Llama, layout: Layout, batch: Batch) -> None:
    """Refuse what Megatron would refuse inside a rank, or accept and compute wrongly.

    Raises:
        OracleError: with every rule that is broken.
    """
    micro_batches, remainder = divmod(len(batch.micro_batches), layout.dp)
    heads = llama.num_key_value_heads
    used = torch.stack([torch.where(micro.valid, micro.targets, 0) for micro in batch.micro_batches])
    used = torch.cat([used.flatten(), *(micro.tokens.flatten() for micro in batch.micro_batches)])
    rules = {
        # A vocabulary-parallel embedding gives zeros for a token that no rank holds, without a word.
        f"tokens and targets go from {used.min()} to {used.max()}: 0 to {llama.vocab_size - 1}, or {IGNORED}": (
            used.min() >= 0 and used.max() < llama.vocab_size
        ),
        f"{len(batch.micro_batches)} micro-batches must be a multiple of dp {layout.dp}": not remainder,
        f"{llama.num_hidden_layers} layers must be a multiple of pp x vpp = {layout.pp * layout.vpp}": (
            llama.num_hidden_layers % (layout.pp * layout.vpp) == 0
        ),
        f"{llama.num_attention_heads} heads must be a multiple of tp {layout.tp}": (
            llama.num_attention_heads % layout.tp == 0
        ),
        f"{heads} key/value heads must be a multiple or a divisor of tp {layout.tp}": (
            heads % layout.tp == 0 or layout.tp % heads == 0
        ),
        f"intermediate_size {llama.intermediate_size} must be a multiple of tp {layout.tp}": (
            llama.intermediate_size % layout.tp == 0
        ),
        f"sequence {batch.shape[1]} must be a multiple of tp {layout.tp} with sequence parallelism": (
            not layout.splits_sequence or batch.shape[1] % layout.tp == 0
        ),
        f"vpp {layout.vpp} needs pp > 1 and micro-batches in multiples of pp {layout.pp}, not {micro_batches}": (
            layout.vpp == 1 or (layout.pp > 1 and micro_batches % layout.pp == 0)
        ),
    }
    broken = [rule for rule, holds in rules.items() if not holds]
    if broken:
        raise OracleError("; ".join(broken))


def megatron_result(
    layout: Layout, model_dir: Path, batch: Batch, *, timeout: float = 300.0, fault: Fault | None = None
) -> MegatronResult:
    """Run one forward and backward over `batch` on `layout.world_size` gloo processes, ended after `timeout` seconds.

    Raises:
        OracleError: the layout is not possible, a rank failed or the time ran out.
    """
    llama = read_llama(model_dir)
    check(llama, layout, batch)
    with tempfile.TemporaryDirectory(prefix="megatron-oracle-") as folder:
        job = Job(model_dir, llama, layout, batch, Path(folder), timeout, fault)
        _spawn(job)
        return _gather(job)


def _spawn(job: Job) -> None:
    """Run every rank to its end; a failed or late rank ends all of them."""
    context = multiprocessing.get_context("spawn")
    deadline = time.monotonic() + job.timeout
    ranks: list[multiprocessing.context.SpawnProcess] = []
    late = False
    try:
        for rank in range(job.layout.world_size):
            ranks.append(context.Process(target=run_rank, args=(rank, job), daemon=True))
            ranks[-1].start()
        while running := [process.sentinel for process in ranks if process.exitcode is None]:
            late = time.monotonic() > deadline
            if late or any(process.exitcode for process in ranks):
                break
            multiprocessing.connection.wait(running, timeout=0.5)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
            if process.pid is not None:
                process.join()
    # The first to fail knows why; the others then lose their peer.
    errors = sorted(job.folder.glob("rank-*.error"), key=lambda error: error.stat().st_mtime_ns)
    if errors:
        raise OracleError(f"{job.layout}: {errors[0].stem} failed\n{errors[0].read_text()}")
    if late:
        raise OracleError(f"{job.layout}: stopped after {job.timeout:.0f} s")
    if any(process.exitcode for process in ranks):
        raise OracleError(f"{job.layout}: exit codes of the ranks: {[process.exitcode for process in ranks]}")


def _gather(job: Job) -> MegatronResult:
    """Join the ranks' reports and gradient shards."""
    reports: list[dict[str, Any]] = []
    for rank in range(job.layout.world_size):
        report = json.loads((job.folder / f"rank-{rank}.json").read_text())
        reports.append(report | {"shards": load_file(job.folder / f"rank-{rank}.safetensors")})
    last_stage = [r for r in reports if r["pp"] == job.layout.pp - 1 and r["tp"] == 0]
    gradients, worst_copy = _gather_gradients(job, reports)
    return {
        "loss": sum(report["loss_sum"] for report in last_stage) / job.batch.valid_tokens,
        "grad_norm": reports[0]["grad_norm"],
        "gradients": gradients,
        "replica_difference": worst_copy,
    }


def _gather_gradients(job: Job, reports: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], float]:
    """Whole gradients under Hugging Face names, and the largest difference between two copies of one."""
    gradients: dict[str, torch.Tensor] = {}
    worst_copy = 0.0
    for stage in range(job.layout.pp):
        for data_rank in range(job.layout.dp):
            group = sorted(
                (r for r in reports if r["pp"] == stage and r["dp"] == data_rank), key=lambda report: report["tp"]
            )
            for name in group[0]["shards"]:
                origin = source(name, tied=job.llama.tie_word_embeddings)
                shards = [report["shards"][name] for report in group]
                if origin.cut is Cut.REPLICATED:
                    worst_copy = max(worst_copy, *(float((piece - shards[0]).abs().max()) for piece in shards))
                whole = unshard(origin.cut, shards, job.llama.shape(job.layout))
                for hf_name, gradient in zip(origin.names, whole, strict=True):
                    if hf_name in gradients:
                        worst_copy = max(worst_copy, float((gradient - gradients[hf_name]).abs().max()))
                    gradients.setdefault(hf_name, gradient)
    return gradients, worst_copy


def as_json(layout: Layout, batch: Batch, result: MegatronResult) -> dict[str, Any]:
    """The result without its tensors: norms in their place."""
    return {
        "system": f"megatron-core {VERSION}",
        "torch": torch.__version__,
        "layout": {name: getattr(layout, name) for name in ("tp", "pp", "vpp", "dp")}
        | {"sequence_parallel": layout.splits_sequence},
        "valid_tokens": batch.valid_tokens,
        "loss": result["loss"],
        "grad_norm": result["grad_norm"],
        "replica_difference": result["replica_difference"],
        "gradient_norms": {name: float(g.double().norm()) for name, g in sorted(result["gradients"].items())},
    }


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder: config.json and safetensors")
    parser.add_argument("--batch", type=Path, required=True, help="micro-batches, see bench/peers/README.md")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel size")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--vpp", type=int, default=1, help="virtual stages a pipeline rank (interleaved 1F1B)")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel size")
    parser.add_argument("--no-sequence-parallel", action="store_true", help="only matters with --tp > 1")
    parser.add_argument("--out", type=Path, help="where to write the JSON result; default: print it")
    parser.add_argument("--gradients", type=Path, help="folder to write gradients.safetensors into")
    parser.add_argument("--check-against-transformers", action="store_true", help="exit 1 where they differ")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds after which every rank is ended")
    return parser.parse_args()


def main() -> int:
    """Run the command line; the exit status says whether the check, if asked for, passed."""
    arguments = parse_arguments()
    sizes = {name: getattr(arguments, name) for name in ("tp", "pp", "vpp", "dp")}
    try:
        layout = Layout(**sizes, sequence_parallel=not arguments.no_sequence_parallel)
        batch = Batch.read(arguments.batch)
        result = megatron_result(layout, arguments.model, batch, timeout=arguments.timeout)
    except (OracleError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    summary = as_json(layout, batch, result)
    passed = True
    if arguments.check_against_transformers:
        from transformers_reference import transformers_result

        found = difference(result, transformers_result(arguments.model, batch))
        passed = found.within(loss=LOSS_TOLERANCE, gradient=GRADIENT_TOLERANCE)
        summary["against_transformers"] = {name: getattr(found, name) for name in found.__slots__} | {"pass": passed}
    if arguments.gradients:
        arguments.gradients.mkdir(parents=True, exist_ok=True)
        save_file(result["gradients"], arguments.gradients / "gradients.safetensors")
    text = json.dumps(summary, indent=2) + "\n"
    if arguments.out:
        arguments.out.write_text(text)
    else:
        print(text, end="")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
