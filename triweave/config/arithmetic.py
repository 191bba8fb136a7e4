"""Sums that turn the numbers of another tool's keys into ours, shown term by term."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from triweave.cluster import parse_cluster
from triweave.config.kinds import Scalar
from triweave.errors import InputError

Given = Mapping[str, Scalar]
"""Every scalar of a file by its key, without section, in lower case and with underscores."""


@dataclass(frozen=True, slots=True)
class Sum:
    """A calculation as text, and what it comes to as far as the file's numbers allow."""

    text: str
    result: str | None = None


Work = Callable[[Scalar, Given], Sum]

_MICRO_BATCH = (
    "micro_batch",
    "per_device_train_batch_size",
    "micro_batch_size",
    "local_batch_size",
    "device_train_microbatch_size",
    "batch_size",
)
_SEQ_LEN = (
    "seq_len",
    "sequence_len",
    "max_seq_length",
    "max_length",
    "max_context_length",
    "cutoff_len",
    "seq_length",
    "sequence_length",
)
_GLOBAL_BATCH = ("global_batch", "global_batch_size", "global_train_batch_size")
_SHARDS = ("data_parallel_shard_degree", "data_parallel_shard_dim", "dp_shard_size")
_REPLICAS = ("data_parallel_replicate_degree", "data_parallel_replicate_dim", "dp_replicate_size")
_PP = ("pp", "pipeline_model_parallel_size", "pipeline_parallel_degree", "pp_size")
_AXES = (
    ("tp", "tensor_model_parallel_size", "tensor_parallel_size", "tensor_parallel_degree", "tp_size"),
    _PP,
    ("cp", "context_parallel_size", "context_parallel_degree", "cp_size"),
)


def accumulated_batch(value: Scalar, given: Given) -> Sum:
    """Micro-batch x accumulation x data-parallel ranks."""
    names = ("micro_batch", "accumulation", "dp")
    return _product("train.global_batch", names, (_number(given, _MICRO_BATCH), _positive(value), _dp(given)))


def data_parallel(value: Scalar, given: Given) -> Sum:
    """Replicas x shards, for tools that count the two apart."""
    replicas, shards = _number(given, _REPLICAS), _number(given, _SHARDS)
    if replicas and shards:
        product = _product("layout.dp", ("replicas", "shards"), (replicas, shards))
        return Sum(f"{product.text}, layout.shard_group = shards = {shards:g}", product.result)
    number = _positive(value)
    return Sum("", str(number) if number else None)


def ranks_of_an_instance(value: Scalar, given: Given) -> Sum:
    """Ranks that hold the same weights / instances of the optimizer among them."""
    dp, cp = _dp(given), _number(given, _AXES[2]) or 1
    ranks = None if dp is None else dp * cp
    return _quotient("layout.shard_group", ("dp x cp", "instances"), (ranks, _positive(value)))


def share_of_learning_rate(value: Scalar, given: Given) -> Sum:
    """Share x peak."""
    peak = _number(given, ("learning_rate", "lr", "max_lr"))
    share = value if isinstance(value, int | float) else None
    if peak is None or share is None:
        return Sum("min_learning_rate = share x learning_rate")
    return Sum(f"min_learning_rate = {share:g} x {peak:g} = {share * peak:g}", f"{share * peak:g}")


def samples_to_steps(value: Scalar, given: Given) -> Sum:
    """Sequences / global batch."""
    return _quotient("steps", ("samples", "global_batch"), (_positive(value), _number(given, _GLOBAL_BATCH)))


def tokens_to_sequences(value: Scalar, given: Given) -> Sum:
    """Tokens of a step / sequence length."""
    return _quotient("global_batch", ("tokens", "seq_len"), (_positive(value), _number(given, _SEQ_LEN)))


def tokens_to_steps(value: Scalar, given: Given) -> Sum:
    """Tokens of a run / (global batch x sequence length)."""
    batch, seq_len = _number(given, _GLOBAL_BATCH), _number(given, _SEQ_LEN)
    names = ("tokens", "global_batch", "seq_len")
    return _quotient("steps", names, (_positive(value), batch, seq_len))


def layers_to_virtual_stages(value: Scalar, given: Given) -> Sum:
    """Layers of the model / (pipeline ranks x layers of a virtual stage)."""
    layers = _number(given, ("num_layers", "num_hidden_layers"))
    names = ("layers", "pp", "layers of a virtual stage")
    return _quotient("vpp", names, (layers, _number(given, _PP), _positive(value)))


def minutes_to_seconds(value: Scalar, given: Given) -> Sum:
    """60 x minutes."""
    return _product("timeout_s", ("60", "minutes"), (60, _positive(value)))


def both_betas(value: Scalar, given: Given) -> Sum:
    """The two betas in one list."""
    first = _number(given, ("adam_beta1", "beta1"))
    second = _number(given, ("adam_beta2", "beta2"))
    return Sum("", f"[{first:g}, {second:g}]" if first and second else "[BETA1, BETA2]")


def duration(value: Scalar, given: Given) -> Sum:
    """The number before `ep`; other units are not epochs."""
    match = re.fullmatch(r"([0-9]+)ep", str(value))
    return Sum("", match[1] if match else None)


def _product(name: str, words: tuple[str, ...], numbers: tuple[float | None, ...]) -> Sum:
    text = f"{name} = {' x '.join(words)}"
    known = [number for number in numbers if number is not None]
    if len(known) < 2:
        return Sum(text)
    terms = [word if number is None else f"{number:g}" for word, number in zip(words, numbers, strict=True)]
    total = 1.0
    for number in known:
        total *= number
    missing = [word for word, number in zip(words, numbers, strict=True) if number is None]
    comes_to = " x ".join([f"{total:.12g}", *missing])
    return Sum(f"{text} = {' x '.join(terms)} = {comes_to}", None if missing else f"{total:.12g}")


def _quotient(name: str, words: tuple[str, ...], numbers: tuple[float | None, ...]) -> Sum:
    """`words[0]` divided by the product of the others, down to a whole number."""

    def fraction(terms: tuple[str, ...]) -> str:
        below = " x ".join(terms[1:])
        return f"{terms[0]} / ({below})" if len(terms) > 2 else f"{terms[0]} / {below}"

    text = f"{name} = {fraction(words)}"
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return Sum(text)
    top, *below = known
    for number in below:
        top /= number
    result = str(max(1, int(top)))
    return Sum(f"{text} = {fraction(tuple(f'{number:.12g}' for number in known))} = {result}", result)


def _dp(given: Given) -> float | None:
    shards = _number(given, _SHARDS)
    stated = _number(given, ("dp", "dp_size", "data_parallel_size"))
    if stated is not None:
        return stated
    if shards is not None:
        return shards * (_number(given, _REPLICAS) or 1)
    if not isinstance(given.get("cluster"), str):
        return None
    try:
        ranks = parse_cluster(str(given["cluster"])).world_size
    except InputError:
        return None
    for names in _AXES:
        size = max(1, int(_number(given, names) or 1))
        if ranks % size:
            return None
        ranks //= size
    return ranks


def _number(given: Given, names: tuple[str, ...]) -> float | None:
    found = (_positive(given.get(name)) for name in names)
    return next((number for number in found if number is not None), None)


def _positive(value: Scalar) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and 0 < value < math.inf else None  # type: ignore[operator,return-value]
