"""Which published rows belong together, and which of them calibrate what the others try."""

from __future__ import annotations

from collections.abc import Callable

from triweave.planner.time_rows import Row


def has(*words: str) -> Callable[[Row], bool]:
    return lambda row: all(word in " ".join((row["source"], row["gpu_type"], row["recompute"])) for word in words)


def sheet(*words: str, kernel: str | None = None, seq: str | None = None) -> Callable[[Row], bool]:
    """Rows of Hagemann et al. (2311.05610) whose sheet's name holds all `words`."""
    return lambda row: (
        "2311.05610" in row["source"]
        and all(word in row["source"] for word in words)
        and (kernel is None or row["source"].endswith(f"kernel={kernel}"))
        and (seq is None or row["seq"] == seq)
    )


LINKS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
RMS = "flash_attention2+RMSkernel"
FLASH1 = "flash_attentionv1.0.8"
FOLDS: tuple[tuple[str, Callable[[Row], bool], tuple[tuple[str, Callable[[Row], bool]], ...], bool], ...] = (
    (
        "13B, sequence 2k (2 sheets, FA2 + RMS kernel)",
        sheet("13B", kernel=RMS, seq="2048"),
        (("30B, 2k", sheet("30B")), ("13B, 8k", sheet("13B", kernel=RMS, seq="8192"))),
        True,
    ),
    (
        "13B, 8k (2 sheets, FA2 + RMS kernel)",
        sheet("13B", kernel=RMS, seq="8192"),
        (("30B, 2k", sheet("30B")), ("13B, 2k", sheet("13B", kernel=RMS, seq="2048"))),
        True,
    ),
    (
        "30B, 2k (FA2 + RMS kernel)",
        sheet("30B"),
        (("13B, 2k", sheet("13B", kernel=RMS, seq="2048")), ("13B, 8k", sheet("13B", kernel=RMS, seq="8192"))),
        True,
    ),
    (
        "13B, 2k, FA1",
        sheet(kernel=FLASH1, seq="2048"),
        (
            ("13B, 8k, FA1", sheet(kernel=FLASH1, seq="8192")),
            ("13B, 2k, fused softmax", sheet(kernel="fused")),
            ("13B, 2k, plain PyTorch", sheet(kernel="torch", seq="2048")),
            ("13B, 8k, plain PyTorch", sheet(kernel="torch", seq="8192")),
            ("13B, 8k, FA2", sheet(kernel="flash_attention2", seq="8192")),
            ("13B, 2k, FA2", sheet(kernel="flash_attention2", seq="2048")),
        ),
        False,
    ),
    ("MosaicML A100", has("mosaicml", "A100"), (("MosaicML H100", has("mosaicml", "H100")),), False),
    ("MosaicML H100", has("mosaicml", "H100"), (("MosaicML A100", has("mosaicml", "A100")),), False),
    (
        "Megatron 2021, table 1",
        has("arXiv 2104.04473"),
        (("Megatron 2022", has("2205.05198")), ("vTrain, many nodes", has("ground_truth_multi"))),
        False,
    ),
    (
        "vTrain, 2 GPUs",
        lambda row: "ground_truth_single" in row["source"] and row["gpus"] == "2",
        (
            ("vTrain, 4 GPUs", lambda row: "ground_truth_single" in row["source"] and row["gpus"] == "4"),
            ("vTrain, 8 GPUs", lambda row: "ground_truth_single" in row["source"] and row["gpus"] == "8"),
            ("vTrain, many nodes", has("ground_truth_multi")),
        ),
        False,
    ),
    (
        "InternEvo, full recompute",
        lambda row: "InternEvo" in row["source"] and row["recompute"] == "full",
        (("InternEvo, none", lambda row: "InternEvo" in row["source"] and row["recompute"] == "none"),),
        False,
    ),
    (
        "NVIDIA 8B, H100, bf16",
        lambda row: "dgxc" in row["source"] and row["model"] == "llama3-8b" and row["precision"] == "bf16",
        (
            (
                "8B, fp8",
                lambda row: "dgxc" in row["source"] and row["model"] == "llama3-8b" and row["precision"] == "fp8",
            ),
            ("70B", lambda row: "dgxc" in row["source"] and row["model"] == "llama3-70b"),
            ("GPT 175B", lambda row: "dgxc" in row["source"] and row["model"] == "gpt3-175b"),
        ),
        False,
    ),
)


def group_of(row: Row) -> str:
    source = row["source"]
    if "2311.05610" in source:
        kernel = source.split("kernel=")[-1]
        return f"Hagemann {row['model'][6:9]} seq {row['seq']} {row['gpus']} GPUs {kernel} {row['recompute'][:5]}"
    for word, name in (
        ("ground_truth_multi", "vTrain many nodes"),
        ("ground_truth_single", "vTrain one node"),
        ("mosaicml", "MosaicML"),
        ("InternEvo", "InternEvo"),
        ("2104.04473", "Megatron 2021"),
        ("2205.05198", "Megatron 2022"),
        ("dgxc", "NVIDIA dgxc"),
        ("SimuMax", "SimuMax"),
        ("torchtitan", "torchtitan"),
        ("torchao", "torchao"),
        ("nanotron", "nanotron"),
        ("ultrascale", "nanotron playbook"),
        ("Bridge", "Megatron-Bridge"),
        ("NeMo", "NeMo"),
        ("docs.nvidia", "NeMo docs"),
    ):
        if word in source:
            gpu = row["gpu_type"].split("-")[0]
            kind = "fp8" if "fp8" in row["precision"] else "bf16"
            return f"{name} {gpu} {kind} {row['recompute'][:9]}".rstrip()
    return source[:40]
