"""What makes a layout legal for a model: every rule, with both numbers and the nearest legal value.

The planner asks these rules of layouts it invents, `validate` of the one a run file gives. Keys are the run file's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from triweave.errors import Problem, divisors, nearest_number
from triweave.layout import Layout, even_layers
from triweave.model_spec import ModelSpec

FP8_DIVISOR = 16
"""Bytes in which tensor cores read a row of fp8: every size of a product is a multiple of it."""

FLASH_HEAD, CUDNN_HEAD, HEAD_STEP = 256, 128, 8
"""Largest heads of two attention kernels, and what heads are multiples of in all but `math`: rows of 16 bytes."""


def layout_problems(
    spec: ModelSpec,
    layout: Layout,
    *,
    world_size: int | None,
    seq_len: int,
    global_batch: int,
    gpus_per_node: int | None,
    tp_across_nodes: bool = False,
) -> list[Problem]:
    """Everything that keeps `layout` from training `spec`; empty if nothing does.

    Args:
        spec: The model.
        layout: The grid. Empty `layers` are not checked: they have not been chosen yet.
        world_size: Ranks there are; None if the grid itself decides.
        seq_len: Tokens of a sequence.
        global_batch: Sequences of an optimizer step.
        gpus_per_node: Ranks of a node; None if it does not matter.
        tp_across_nodes: Whether a tensor-parallel group may leave its node.
    """
    sizes = size_problems(layout, seq_len, global_batch)
    if sizes:
        return sizes
    return [
        *grid_problems(layout, world_size=world_size, global_batch=global_batch),
        *model_problems(spec, layout, seq_len=seq_len, gpus_per_node=gpus_per_node, tp_across_nodes=tp_across_nodes),
    ]


def size_problems(layout: Layout, seq_len: int, global_batch: int) -> list[Problem]:
    """Sizes that are not positive; the other rules divide by them and take them for granted."""
    sizes = {f"layout.{name}": getattr(layout, name) for name in ("tp", "pp", "vpp", "cp", "dp", "micro_batch")}
    if layout.shard_group is not None:
        sizes["layout.shard_group"] = layout.shard_group
    sizes |= {"data.seq_len": seq_len, "train.global_batch": global_batch}
    return [Problem(key, size, "must be at least 1", "1") for key, size in sizes.items() if size < 1]


def grid_problems(layout: Layout, *, world_size: int | None, global_batch: int) -> list[Problem]:
    """The rules that need no model: ranks, schedule, batch, recompute. Sizes must be positive."""
    grid = [] if world_size is None else list(_world(layout, world_size))
    # With a wrong grid dp is not settled, and what is told about the batch would be about another one.
    batch = [] if grid else list(_batch(layout, global_batch))
    shards = [] if grid else list(_shard_group(layout))
    return [*grid, *_schedule(layout), *batch, *shards, *_recompute(layout), *_offload(layout), *_graphs(layout)]


def model_problems(
    spec: ModelSpec, layout: Layout, *, seq_len: int, gpus_per_node: int | None, tp_across_nodes: bool
) -> list[Problem]:
    """The rules about the model's sizes: heads, widths, layers, sequence. Sizes must be positive."""
    node = None if tp_across_nodes else gpus_per_node
    return [*_tensor(spec, layout, node), *_stages(spec, layout), *_sequence(spec, layout, seq_len)]


def fp8_problems(spec: ModelSpec, layout: Layout, seq_len: int) -> list[Problem]:
    """Sizes of a rank's products that tensor cores cannot take in fp8; the layout must be legal otherwise."""
    tp, cp, by = layout.tp, layout.cp, FP8_DIVISOR
    kv_heads = max(1, spec.num_key_value_heads // tp)
    sizes = {
        "hidden_size": spec.hidden_size,
        f"the attention heads of a rank, {spec.num_attention_heads} / {tp} x {spec.head_dim}": spec.query_size // tp,
        f"the key/value heads of a rank, {kv_heads} x {spec.head_dim}": kv_heads * spec.head_dim,
        f"intermediate_size / tp = {spec.intermediate_size} / {tp}": spec.intermediate_size // tp,
        f"seq_len / cp x micro_batch = {seq_len} / {cp} x {layout.micro_batch}": seq_len // cp * layout.micro_batch,
    }
    return [
        Problem("model.fp8", True, f"needs sizes that are multiples of {by}: {name} is {size}", "false")
        for name, size in sizes.items()
        if size % by
    ]


def attention_problems(
    spec: ModelSpec, layout: Layout, kernel: str, *, dtype: str, packing: bool, deterministic: bool
) -> list[Problem]:
    """Why the kernel that is asked for cannot compute attention on a GPU; `auto` and `math` always can.

    Without this torch would say so in the first step (`sdp_utils.cpp`, torch 2.11 to 2.13). Sizes must be positive.

    Args:
        spec: The model.
        layout: The grid.
        kernel: `model.attention`.
        dtype: `model.dtype`.
        packing: Whether sequences may hold several documents.
        deterministic: Whether results must not depend on timing.
    """
    size, cp = spec.head_dim, layout.cp
    rules = []
    if kernel in ("flash", "cudnn") and dtype == "float32":
        rules.append("computes in 16 bits, and model.dtype is float32")
    if kernel == "flash":
        if size > FLASH_HEAD:
            rules.append(f"takes heads of at most {FLASH_HEAD}; the model's have {size}")
        elif size % HEAD_STEP and (packing or cp > 1):
            why = f"layout.cp is {cp}" if cp > 1 else "data.packing is true"
            rules.append(f"takes heads that are multiples of {HEAD_STEP} where {why}; the model's have {size}")
    elif kernel == "cudnn":
        if size > CUDNN_HEAD or size % HEAD_STEP:
            rule = f"takes heads of at most {CUDNN_HEAD} that are multiples of {HEAD_STEP}; the model's have {size}"
            rules.append(rule)
        if deterministic:
            rules.append("has no kernel whose result does not depend on timing, as runtime.deterministic wants it")
        if packing:
            rules.append(
                "has no kernel for packed documents, and data.packing is true; auto takes flash for them alone"
            )
    elif kernel == "efficient":
        if cp > 1:
            rules.append(f"gives no part of an attention with its log-sum-exp that layout.cp = {cp} could add up")
        if size % HEAD_STEP:
            rules.append(f"takes heads that are multiples of {HEAD_STEP}; the model's have {size}")
    return [Problem("model.attention", kernel, rule, "auto") for rule in rules]


def _world(layout: Layout, world_size: int) -> Iterator[Problem]:
    tp, pp, cp, dp = layout.tp, layout.pp, layout.cp, layout.dp
    model_ranks = tp * pp * cp
    if world_size % model_ranks == 0:
        if dp != world_size // model_ranks:
            rule = (
                f"tp x pp x cp x dp = {tp} x {pp} x {cp} x {dp} = {layout.world_size}, and there are {world_size} ranks"
            )
            yield Problem("layout.dp", dp, rule, str(world_size // model_ranks))
        return
    rule = f"tp x pp x cp = {tp} x {pp} x {cp} = {model_ranks} must divide the {world_size} ranks"
    for axis in ("pp", "tp", "cp"):
        size = getattr(layout, axis)
        others = model_ranks // size
        if world_size % others == 0:
            yield Problem(f"layout.{axis}", size, rule, nearest_number(size, divisors(world_size // others)))
            return
    ranks = _nearest_multiple(world_size, model_ranks)
    yield Problem("layout", layout, rule, None if ranks is None else f"{ranks} ranks")


def _schedule(layout: Layout) -> Iterator[Problem]:
    pp, vpp, schedule = layout.pp, layout.vpp, layout.schedule
    if schedule == "interleaved":
        if pp == 1:
            rest = "" if vpp == 1 else f" (and then vpp = {vpp} must be 1)"
            yield Problem("layout.schedule", schedule, f"needs pp > 1, and pp is 1{rest}", "1f1b")
        elif vpp == 1:
            yield Problem("layout.vpp", vpp, "must be more than 1 for the interleaved schedule", "2")
    elif vpp > 1:
        rule = f"virtual stages need schedule: interleaved; {schedule} has 1 a pipeline rank"
        yield Problem("layout.vpp", vpp, rule, "1")
    if schedule == "zero-bubble" and pp == 1:
        yield Problem("layout.schedule", schedule, "needs pp > 1, and pp is 1", "1f1b")


def _batch(layout: Layout, global_batch: int) -> Iterator[Problem]:
    pp, sequences = layout.pp, layout.micro_batch * layout.dp
    interleaved = layout.schedule == "interleaved"
    product = f"micro_batch x dp = {layout.micro_batch} x {layout.dp} = {sequences}"
    micro_batches, rest = divmod(global_batch, sequences)
    if rest:
        rule = f"must be a multiple of {product}"
    elif micro_batches < pp:
        rule = (
            f"gives {micro_batches} micro-batches of {product} sequences; pp = {pp} pipeline ranks need at least {pp}"
        )
    elif interleaved and micro_batches % pp:
        rule = (
            f"gives {micro_batches} micro-batches of {product} sequences; "
            f"the interleaved schedule takes them in groups of pp = {pp}"
        )
    else:
        return
    step = sequences * pp if interleaved else sequences
    yield Problem(
        "train.global_batch", global_batch, rule, _nearest_multiple(global_batch, step, at_least=sequences * pp)
    )


def _shard_group(layout: Layout) -> Iterator[Problem]:
    group, replicas = layout.shard_group, layout.replicas
    if group is None:
        return
    if layout.shard == "none":
        yield Problem("layout.shard_group", group, "needs something to split, and shard is none")
    elif replicas % group:
        rule = f"must divide dp x cp = {layout.dp} x {layout.cp} = {replicas}"
        yield Problem("layout.shard_group", group, rule, nearest_number(group, divisors(replicas)))


def _recompute(layout: Layout) -> Iterator[Problem]:
    kinds = layout.recompute
    shown = f"[{', '.join(kinds)}]"
    once = list(dict.fromkeys(kinds))
    if len(once) < len(kinds):
        yield Problem("layout.recompute", shown, "names one thing twice", f"[{', '.join(once)}]")
    elif "layer" in kinds and len(kinds) > 1:
        yield Problem("layout.recompute", shown, "layer recomputes whole layers, the others included", "[layer]")
    elif "mlp" in kinds and "swiglu" in kinds:
        rest = ", ".join(kind for kind in kinds if kind != "swiglu")
        yield Problem("layout.recompute", shown, "mlp recomputes the swiglu inside it", f"[{rest}]")
    if layout.keep_gathered and "norm" in kinds:
        rule = "norm computes a product's input again in backward, slice by slice, so there is nothing gathered to keep"
        yield Problem("layout.keep_gathered", "true", rule, "false")


def _offload(layout: Layout) -> Iterator[Problem]:
    kinds, again = layout.offload, layout.recompute
    shown = f"[{', '.join(kinds)}]"
    once = list(dict.fromkeys(kinds))
    made_again = [kind for kind in once if kind != "layer" and kind in again]
    if len(once) < len(kinds):
        yield Problem("layout.offload", shown, "names one thing twice", f"[{', '.join(once)}]")
    elif "layer" in kinds and len(kinds) > 1:
        yield Problem("layout.offload", shown, "layer moves all that a layer keeps, the others included", "[layer]")
    elif "layer" in again and kinds and "layer" not in kinds:
        rule = "recompute: [layer] keeps nothing but each layer's input, and that is offload: [layer]"
        yield Problem("layout.offload", shown, rule, "[layer]")
    elif made_again:
        rule = f"{made_again[0]} is computed again (recompute: [{', '.join(again)}]): nothing is kept that could wait"
        rest = [kind for kind in once if kind not in made_again]
        yield Problem("layout.offload", shown, rule, f"[{', '.join(rest)}]")


def _graphs(layout: Layout) -> Iterator[Problem]:
    """A graph reads and writes where it did when it was captured, and waits for nobody but copy engines."""
    if not layout.cuda_graphs:
        return
    rules = []
    if layout.replicas > 1 and layout.shard in ("gradients", "full"):
        rules.append(f"graphs need whole sums of gradients that stay where they are, and shard is {layout.shard}")
    if layout.offload:
        rules.append(f"graphs need what a layer keeps where it is, and offload: [{', '.join(layout.offload)}] moves it")
    if layout.cp > 1:
        rules.append(f"graphs hold no collectives, and cp = {layout.cp} ranks gather keys by them")
    if layout.tp > 1 and not layout.sequence_parallel:
        rules.append(f"graphs hold no collectives, and tp = {layout.tp} without sequence_parallel sums by them")
    yield from (Problem("layout.cuda_graphs", "true", rule, "false") for rule in rules)


def even_problems(spec: ModelSpec, layout: Layout) -> list[Problem]:
    """Why virtual stages cannot have equally many layers, where nobody has said how many each shall have."""
    pp, vpp, num_layers = layout.pp, layout.vpp, spec.num_hidden_layers
    if vpp == 1 or num_layers % layout.num_stages == 0 or layout.num_stages > num_layers:
        return []
    rule = (
        f"must divide the {num_layers // pp} layers of a pipeline rank; layers: balanced, or numbers, cut them unevenly"
        if num_layers % pp == 0
        else f"pp x vpp = {pp} x {vpp} = {layout.num_stages} must divide the {num_layers} layers;"
        " layers: balanced, or numbers, cut them unevenly"
    )
    legal = [other for other in divisors(num_layers) if other > 1 and num_layers % (pp * other) == 0]
    return [Problem("layout.vpp", vpp, rule, nearest_number(vpp, legal))]


def _tensor(spec: ModelSpec, layout: Layout, gpus_per_node: int | None) -> Iterator[Problem]:
    tp, world_size = layout.tp, layout.world_size
    heads, kv_heads, ffn = spec.num_attention_heads, spec.num_key_value_heads, spec.intermediate_size
    rules = []
    if heads % tp:
        rules.append(f"must divide the {heads} attention heads")
    if not _shares(kv_heads, tp):
        rules.append(f"must divide the {kv_heads} key/value heads or be a multiple of them")
    if ffn % tp:
        rules.append(f"must divide intermediate_size = {ffn}")
    if gpus_per_node and world_size > gpus_per_node and gpus_per_node % tp:
        rules.append(
            f"a tensor-parallel group would leave its node of {gpus_per_node} GPUs: "
            "tp must divide them, unless layout.tp_across_nodes allows it"
        )
    if not rules:
        return
    legal = [t for t in divisors(heads) if _shares(kv_heads, t) and ffn % t == 0]
    if gpus_per_node and world_size > gpus_per_node:
        legal = [t for t in legal if gpus_per_node % t == 0]
    for rule in rules:
        yield Problem("layout.tp", tp, rule, nearest_number(tp, legal))


def _shares(kv_heads: int, tp: int) -> bool:
    """Whether ranks hold whole key/value heads: several each, or one shared by several ranks."""
    return kv_heads % tp == 0 or tp % kv_heads == 0


def _stages(spec: ModelSpec, layout: Layout) -> Iterator[Problem]:
    pp, vpp, num_layers = layout.pp, layout.vpp, spec.num_hidden_layers
    stages = layout.num_stages
    if stages > num_layers:
        product = f"pp x vpp = {pp} x {vpp} = {stages} virtual stages"
        rule = f"{product if vpp > 1 else f'{pp} stages'} for the model's {num_layers} layers: each needs at least 1"
        if num_layers // pp >= 2:
            yield Problem("layout.vpp", vpp, rule, str(num_layers // pp))
        else:
            yield Problem("layout.pp", pp, rule, str(max(1, num_layers // vpp)))
        return
    if not layout.layers:
        return
    shown = f"[{', '.join(map(str, layout.layers))}]"
    even = f"[{', '.join(map(str, even_layers(num_layers, stages)))}]"
    if len(layout.layers) != stages:
        rule = f"gives layers of {len(layout.layers)} stages; pp x vpp = {pp} x {vpp} = {stages}"
        yield Problem("layout.layers", shown, rule, even)
    if (total := sum(layout.layers)) != num_layers:
        yield Problem("layout.layers", shown, f"sums to {total}; the model has {num_layers} layers", even)
    for stage, count in enumerate(layout.layers):
        if count < 1:
            rule = f"stage {stage} has {count} layers; each needs at least 1"
            yield Problem("layout.layers", shown, rule, even)


def _sequence(spec: ModelSpec, layout: Layout, seq_len: int) -> Iterator[Problem]:
    tp, cp = layout.tp, layout.cp
    # Context-parallel ranks take one slice from each end, so that causal attention costs each of them the same.
    slices = 2 * cp if cp > 1 else 1
    splits = tp * cp if layout.uses_sequence_parallel else cp
    step = math.lcm(slices, splits)
    limits = {"max_position_embeddings": spec.max_position_embeddings}
    if spec.sliding_window is not None:
        limits["sliding_window"] = spec.sliding_window
    rules = []
    if seq_len % slices:
        rules.append(f"must be a multiple of 2 x cp = 2 x {cp} = {slices}: context parallel ranks take two slices each")
    elif seq_len % splits:
        product = f"cp x tp = {cp} x {tp} = {splits}" if cp > 1 else f"tp = {tp}"
        rules.append(f"must be a multiple of {product}, among which sequence_parallel splits it")
    rules += [f"must be at most the model's {name} = {limit}" for name, limit in limits.items() if seq_len > limit]
    if rules:
        nearest = _nearest_multiple(seq_len, step, at_most=min(limits.values()))
        yield from (Problem("data.seq_len", seq_len, rule, nearest) for rule in rules)


def _nearest_multiple(value: int, step: int, *, at_least: int = 1, at_most: int | None = None) -> str | None:
    """The multiple of `step` in the range that is nearest to `value`, None if there is none."""
    lowest = -(-at_least // step) * step
    below = value // step * step
    candidates: Iterable[int] = (lowest, below, below + step)
    if at_most is not None:
        candidates = (*candidates, at_most // step * step)
    return nearest_number(
        value, (number for number in candidates if number >= lowest and (at_most is None or number <= at_most))
    )
