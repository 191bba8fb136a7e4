"""Memory and speed of `triweave convert` on the tensors of Llama-3-70B, with as many layers as the disk has room for.

    python bench/convert.py --folder DIR [--layers 4] [--out TABLE.md]

A Hugging Face folder with the real shapes of Llama-3-70B (8192 hidden, 28672 feed-forward, vocabulary 128,256,
bfloat16) is drawn, then converted, each way in a process of its own: to a checkpoint of triweave and back, to
Megatron-Core and back. Peak memory is the process's largest resident set (`ru_maxrss`, torch and Python included). GB/s
are the bytes of stored weights that were read, over the time from the first look at the source to the flushed disk.
CPU seconds are of all threads, and say more than the clock on a busy machine. The folders that came back are compared
with the first byte by byte. That memory does not depend on the number of layers is what several numbers after
`--layers` show.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from triweave.checkpoint.safetensors_file import SafetensorsFile
from triweave.model_spec import spec_from_folder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
WAYS = (
    ("Hugging Face to triweave", "hf", "step-0", ("--to", "triweave")),
    ("triweave to Hugging Face", "step-0", "from-triweave", ("--model", "hf")),
    ("Hugging Face to Megatron", "hf", "megatron", ("--to", "megatron")),
    ("Megatron to Hugging Face", "megatron", "from-megatron", ()),
)


def draw(folder: Path, layers: int) -> int:
    """Write the model, tensor by tensor; returns its parameters."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    spec = spec_from_folder(folder)
    tensors = list(spec.tensors())
    file = SafetensorsFile(folder / "model.safetensors", tensors, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    # Random bits of numbers below 1, shifted from row to row: content does not matter, that it differs does.
    noise = torch.randint(0, 2**14, (2**22,), generator=generator, dtype=torch.int16)
    noise |= torch.randint(0, 2, noise.shape, generator=generator, dtype=torch.int16) * -(2**15)
    for number, tensor in enumerate(tensors):
        step = max(1, 2**26 // max(1, tensor.numel // tensor.shape[0]))
        for row in range(0, tensor.shape[0], step):
            shape = (min(step, tensor.shape[0] - row), *tensor.shape[1:])
            count = torch.Size(shape).numel()
            drawn = noise.roll(number * 7919 + row).repeat(-(-count // len(noise)))[:count]
            file.write_rows(tensor.name, drawn.view(torch.bfloat16).view(shape))
    return spec.num_parameters


def measure(words: list[str], cwd: Path) -> dict[str, Any]:
    """Convert in a process of its own; what it told, and its peak memory."""
    code = (
        "import sys, resource, json\n"
        "from triweave.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally:\n"
        "    used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "    cpu_s = used.ru_utime + used.ru_stime\n"
        "    print(json.dumps({'peak_bytes': used.ru_maxrss * 1024, 'cpu_s': cpu_s}))\n"
    )
    command = [sys.executable, "-c", code, "convert", *words, "--json"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    done = subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True, env=environment)
    told, peak = (json.loads(line) for line in done.stdout.splitlines())
    return {**told, **peak}


def same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same tensors, bit for bit."""
    from triweave.weights_index import weights_index

    ours, theirs = weights_index(one), weights_index(other)
    if ours.keys() != theirs.keys():
        return False
    for name, entry in ours.items():
        with entry.file.open("rb") as first, theirs[name].file.open("rb") as second:
            first.seek(entry.begin)
            second.seek(theirs[name].begin)
            left = entry.end - entry.begin
            while left:
                size = min(left, 2**24)
                if first.read(size) != second.read(size):
                    return False
                left -= size
    return True


def main() -> int:
    """Run every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, required=True, help="where to write; made, and removed at the end")
    parser.add_argument("--layers", type=int, nargs="+", default=[4], help="of the 80")
    parser.add_argument("--out", type=Path, help="where the table goes too")
    arguments = parser.parse_args()
    lines = [
        f"torch {torch.__version__}, Python {sys.version.split()[0]}, {os.cpu_count()} cores",
        "",
        "| layers of 80 | weights, GB | way | peak memory, GiB | seconds | CPU seconds | GB/s | bit for bit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    good = True
    for layers in arguments.layers:
        root = arguments.folder / f"layers-{layers}"
        parameters = draw(root / "hf", layers)
        try:
            for way, source, target, options in WAYS:
                told = measure([source, target, *options], root)
                same = "-"
                if target.startswith("from-"):
                    equal = same_weights(root / "hf", root / target)
                    good &= equal
                    same = "yes" if equal else "NO"
                    shutil.rmtree(root / target)
                    shutil.rmtree(root / source)
                speed = told["read_bytes"] / 1e9 / told["seconds"]
                lines.append(
                    f"| {layers} | {2 * parameters / 1e9:.1f} | {way} | {told['peak_bytes'] / 2**30:.2f} |"
                    f" {told['seconds']:.0f} | {told['cpu_s']:.0f} | {speed:.2f} | {same} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(root)
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if arguments.out:
        arguments.out.write_text(text)
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
