"""A tiny model's run, and torchrun over several hosts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hosts import Hosts

ROOT = Path(__file__).parent.parent.parent
PORT = 29500


def make_files(folder: Path, *, hidden: int, layers: int, heads: int, seq: int, lines: int = 256) -> None:
    """A model's config and data that needs no tokenizer."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 96,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.05,
    }
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    draw = random.Random(1)  # noqa: S311
    words = [json.dumps({"input_ids": [draw.randrange(96) for _ in range(seq)]}) for _ in range(lines)]
    (folder / "data.jsonl").write_text("\n".join(words), encoding="utf-8")


def write_run(folder: Path, name: str, **sections: Mapping[str, Any]) -> Path:
    """A run file of that model; `sections` change its keys."""
    run: dict[str, dict[str, Any]] = {
        "model": {"path": "model", "weights": "random", "dtype": "float32"},
        "data": {"train": "data.jsonl", "format": "tokens", "validation": 0},
        "checkpoint": {"export": False},
        "runtime": {"device": "cpu", "timeout_s": 240},
    }
    for section, keys in sections.items():
        run[section] = {**run.get(section, {}), **keys}
    path = folder / f"{name}.yaml"
    # JSON is YAML.
    path.write_text(json.dumps({**run, "output_dir": name}), encoding="utf-8")
    return path


def environment() -> dict[str, str]:
    """For every process of a bench: this package, one thread a rank, no network."""
    more = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**os.environ, **more}


def torchrun(num_hosts: int, node: int, per_host: int, words: Sequence[str]) -> list[str]:
    """The command of one host: static rendezvous, ranks numbered as given."""
    meeting = ("--master-addr", "h1", "--master-port", str(PORT))
    counts = ("--nnodes", str(num_hosts), "--node-rank", str(node), "--nproc-per-node", str(per_host))
    return [sys.executable, "-m", "torch.distributed.run", *counts, *meeting, *words]


def over_hosts(
    hosts: Hosts,
    per_host: int,
    words: Sequence[str],
    folder: Path,
    log: str,
    *,
    env: Mapping[int, Mapping[str, str]] | None = None,
    before: Mapping[int, str] | None = None,
    program: Sequence[str] = ("-m", "triweave"),
    meanwhile: Callable[[Callable[[], bool]], None] | None = None,
) -> tuple[int, str]:
    """triweave under torchrun on every host; the first host's exit code and standard output.

    Args:
        hosts: that are up.
        per_host: ranks of each.
        words: of triweave's command line.
        folder: where it runs; logs of the hosts stay there.
        log: beginning of their names.
        env: more variables of a host, by its number from 1.
        before: a line of shell that a host runs first, by its number from 1; what it mounts that host alone sees.
        program: what torchrun starts, before `words`.
        meanwhile: called while they run, with what says whether they still do.
    """
    started = []
    for number in range(1, hosts.count + 1):
        out = folder / f"{log}-h{number}.log"
        out.unlink(missing_ok=True)
        variables = {**environment(), **(env or {}).get(number, {})}
        command = torchrun(hosts.count, number - 1, per_host, (*program, *words))
        if before is not None and number in before:
            command = ["sh", "-c", f'{before[number]} && exec "$@"', "sh", *command]
        started.append(hosts.start(f"h{number}", command, cwd=folder, env=variables, out=out))
    if meanwhile is not None:
        meanwhile(lambda: all(process.poll() is None for process in started))
    try:
        codes = [process.wait(timeout=500) for process in started]
    except subprocess.TimeoutExpired:
        codes = [-1]
    for number in range(1, hosts.count + 1):
        hosts.unplug(f"h{number}")
    return codes[0], (folder / f"{log}-h1.log").read_text(encoding="utf-8")


def document(text: str) -> dict[str, Any]:
    """The JSON document in a log."""
    line = next(line for line in text.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    return found
