"""What the published rows themselves can bear: runs measured twice, the order that noise allows, FLOP conventions."""

from __future__ import annotations

import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from time_cases import Case, kendall, picked, predict
from time_groups import group_of

from triweave.planner.time_shapes import Decoder

DRAWS = 400
PEAKS = {"a100": 312e12, "a800": 312e12, "h100": 989e12, "h200": 989e12}
"""What a printed MFU divides by, where a source prints no FLOP/s."""
SHAPE = ("model", "seq", "gpus", "gbs", "mbs", "tp", "pp", "vpp", "cp", "zero", "precision", "recompute", "gpu_type")


def repeats(cases: Sequence[Case]) -> list[tuple[Case, Case]]:
    """Pairs of one layout measured twice by one source; with one tensor-parallel rank `sp` changes nothing."""
    groups: defaultdict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        row = case.row
        source = row["source"].split(" trial ")[0] + row["source"].split("kernel=")[-1]
        sp = row["sp"] if row["tp"] != "1" else ""
        groups[(source, sp, *(row[key] for key in SHAPE))].append(case)
    return [
        (members[0], other)
        for members in groups.values()
        for other in members[1:]
        # The same number is the same run, listed twice.
        if abs(other.measured / members[0].measured - 1) > 1e-4
    ]


def noise(pairs: Sequence[tuple[Case, Case]]) -> float:
    """Standard deviation of one measurement, from pairs."""
    return math.sqrt(statistics.mean(math.log(b.measured / a.measured) ** 2 for a, b in pairs) / 2)


def attainable(measured: Sequence[float], deviation: float) -> tuple[float, float]:
    """Kendall's tau and the pick's loss of a model without error, where each time is measured with `deviation`.

    The times as measured stand for the true ones, and are measured again.
    """
    generator = random.Random(0)  # noqa: S311
    taus, losses = [], []
    for _ in range(DRAWS):
        pairs = [(time, time * math.exp(generator.gauss(0, deviation))) for time in measured]
        tau = kendall(pairs)
        if tau is not None:
            taus.append(tau)
        losses.append(picked(pairs) / min(again for _, again in pairs) - 1)
    return statistics.mean(taus), statistics.mean(losses)


def sheets(cases: Sequence[Case]) -> list[list[str]]:
    """Order and pick of every sweep of at least four layouts, beside what noise allows."""
    deviation = noise([pair for pair in repeats(cases) if "2311.05610" in pair[0].row["source"]])
    sweeps: defaultdict[tuple[str, ...], list[Case]] = defaultdict(list)
    for case in cases:
        if "2311.05610" in case.row["source"]:
            sweeps[(group_of(case.row), *case.sweep)].append(case)
    table = []
    for key, members in sorted(sweeps.items()):
        if len(members) < 4:
            continue
        pairs = [(predict(case)[0], case.measured) for case in members]
        single = [pair for pair, case in zip(pairs, members, strict=True) if case.row["pp"] != "2"]
        best_tau, best_loss = attainable([measured for _, measured in pairs], deviation)
        loss = picked(pairs) / min(measured for _, measured in pairs) - 1
        without = kendall(single) if len(single) >= 4 else None
        table.append(
            [
                key[0].removeprefix("Hagemann "),
                str(len(members)),
                f"{kendall(pairs) or 0:.2f}",
                f"{best_tau:.2f}",
                f"{100 * loss:.1f} %",
                f"{100 * best_loss:.1f} %",
                "-" if without is None else f"{without:.2f}",
            ]
        )
    return table


def repeated(cases: Sequence[Case]) -> list[list[str]]:
    """Layouts that one source measured twice, furthest apart first."""
    table = []
    for a, b in sorted(repeats(cases), key=lambda pair: -abs(math.log(pair[1].measured / pair[0].measured))):
        row = a.row
        table.append(
            [
                group_of(row),
                row["model"],
                f"{row['gpus']} GPUs, tp{row['tp']} pp{row['pp']} mbs {row['mbs']}, batch {row['gbs'] or '-'}",
                f"{a.measured:.4g}, {b.measured:.4g} s",
                f"{100 * abs(b.measured / a.measured - 1):.1f} %",
            ]
        )
    return table


def conventions(decoder: Decoder, seq: int) -> Mapping[str, float]:
    """FLOPs of one token, forward and backward, as different sources count them."""
    causal, full = (decoder.flops_per_token(seq, causal=causal) for causal in (True, False))
    layers = 6.0 * decoder.layers * decoder.layer_parameters
    head = 6.0 * decoder.head_parameters
    hidden = decoder.hidden
    # Narayanan et al. 2104.04473, equation 3: GPT's shapes, hardware FLOPs with every layer recomputed.
    gpt = 72.0 * decoder.layers * hidden**2 * (1 + seq / (6 * hidden) + decoder.vocab / (12 * decoder.layers * hidden))
    return {
        "causal attention": causal,
        "full attention": full,
        "full attention, input embedding counted": full + head,
        "6 N, head counted": layers + head,
        "6 N, head and embedding counted": layers + 2 * head,
        "2104.04473, model FLOPs": gpt,
        "2104.04473, hardware FLOPs": 96.0
        * decoder.layers
        * hidden**2
        * (1 + seq / (6 * hidden) + decoder.vocab / (16 * decoder.layers * hidden)),
        "hardware FLOPs, full attention": 4 / 3 * (full - head) + head,
    }


def implied(case: Case) -> float | None:
    """FLOPs of a token that a row's FLOP/s or MFU imply; None where it prints neither."""
    row = case.row
    peak = next((rate for gpu, rate in PEAKS.items() if row["gpu_type"].lower().startswith(gpu)), None)
    if row["tflops_per_gpu"]:
        rate = float(row["tflops_per_gpu"]) * 1e12
    elif row["mfu"] and peak is not None and "fp8" not in row["precision"]:
        share = float(row["mfu"])
        rate = (share if share < 1 else share / 100) * peak
    else:
        return None
    return rate * case.run.layout.world_size * case.measured / (case.run.global_batch * case.run.seq_len)


WITHIN = 0.015
"""How far printed FLOPs may be from a convention: rounding of printed figures, vocabularies that are not stated."""


def flop_conventions(cases: Sequence[Case]) -> list[list[str]]:
    """The convention that most rows of a source follow, and the rows that do not: their step or their FLOP/s is off."""
    groups: defaultdict[str, list[tuple[float, Case]]] = defaultdict(list)
    for case in cases:
        flops = implied(case)
        if flops is not None:
            source = re.split(r" (?:seq|[ABGH]\d+|GB\d+) ", group_of(case.row))[0]
            repeats_layers = "layer" in case.run.layout.recompute
            groups[f"{source}, layers recomputed" if repeats_layers else source].append((flops, case))
    table = []
    for source, members in sorted(groups.items()):
        known = [(flops, conventions(case.run.decoder, case.run.seq_len), case) for flops, case in members]

        def off(name: str, known: list[tuple[float, Mapping[str, float], Case]] = known) -> float:
            return statistics.median(abs(flops / counts[name] - 1) for flops, counts, _ in known)

        name = min(known[0][1], key=off)
        others = sorted(
            ((flops / counts[name] - 1, case) for flops, counts, case in known), key=lambda pair: -abs(pair[0])
        )
        others = [(error, case) for error, case in others if abs(error) > WITHIN]
        told = "; ".join(f"{error * 100:+.1f} % {_named(case)}" for error, case in others) or "none"
        table.append([source, str(len(members)), name, f"{100 * off(name):.1f} %", told])
    return table


def _named(case: Case) -> str:
    row = case.row
    gpus = f"{row['gpus']}x{row['gpu_type'].split('-')[0]}"
    return f"{row['model']} {gpus} s{row['seq']} tp{row['tp']} pp{row['pp']} mbs{row['mbs']}"
