"""The grid: which rank sits where on the tensor, context, data and pipeline axes, and which layers it holds.

N = TP x CP x DP x PP. Tensor-parallel neighbours have adjacent ranks (they talk most, so they share a node's
NVLink); pipeline stages are farthest apart (they talk least, so they may span nodes).
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import Literal, get_args

from triweave.model_spec import ModelSpec

Axis = Literal["tp", "cp", "dp", "pp"]
AXES: tuple[Axis, ...] = get_args(Axis)
"""From adjacent ranks to distant ones."""

Shard = Literal["none", "optimizer", "gradients", "full"]
UNITS_AHEAD = 2
"""`full`: units whose weights are gathered beside the one that computes. Two, for a norm hides no gather of a head."""
REDUCTIONS_BESIDE = 2
"""`gradients`, `full`: units whose gradients are being reduced while the next one's backward computes."""
Schedule = Literal["gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["norm", "swiglu", "attention", "mlp", "layer"]
Offload = Literal["attention", "mlp", "layer"]


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where one rank sits on the four axes, each from 0."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to spread a model over a grid of ranks. Pure numbers; prints as `tp8 pp4 dp2`."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    """Virtual stages a pipeline rank holds (1 unless the schedule is interleaved)."""
    cp: int = 1
    dp: int = 1
    micro_batch: int = 1
    sequence_parallel: bool = True
    """Megatron's meaning: between the tensor-parallel products, activations are split along the sequence."""
    keep_gathered: bool = False
    """Keep the gathered input of a column-parallel product for backward, where it is gathered again without this."""
    schedule: Schedule = "1f1b"
    shard: Shard = "optimizer"
    shard_group: int | None = None
    """Neighbouring ranks of dp x cp among which `shard` splits, each such group a replica of the others (HSDP); None is
    all of them."""
    recompute: tuple[Recompute, ...] = ()
    offload: tuple[Offload, ...] = ()
    """What waits in host memory between forward and backward: what `recompute` would make again under the same name, or
    all that a layer keeps (`layer`), its input included."""
    cuda_graphs: bool = False
    """Issue each pass of a layer in one call; each micro-batch in flight has memory of its own for it."""
    layers: tuple[int, ...] = ()
    """Decoder layers of each virtual stage, in model order; its length is pp x vpp."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the grid."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline: pp x vpp."""
        return self.pp * self.vpp

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether activations are split along the sequence; with one tensor rank there is nothing to split."""
        return self.sequence_parallel and self.tp > 1

    @property
    def keeps_gathered(self) -> bool:
        """Whether gathered inputs are kept: without sequence parallelism there are none."""
        return self.keep_gathered and self.uses_sequence_parallel

    @property
    def replicas(self) -> int:
        """Ranks that hold the same part of the model: context-parallel ranks compute with the same weights too."""
        return self.dp * self.cp

    @property
    def shard_ranks(self) -> int:
        """Ranks that share out what `shard` splits: 1 where every rank keeps all of it."""
        if self.shard == "none":
            return 1
        return self.replicas if self.shard_group is None else self.shard_group

    @property
    def uses_shard_groups(self) -> bool:
        """Whether `shard` splits among fewer ranks than there are, so that its slices are kept several times."""
        return self.shard != "none" and self.shard_ranks < self.replicas

    @property
    def sharing(self) -> str:
        """What is shared out among whom, in words: `optimizer`, `full among 8` where there are shard groups of 8."""
        return f"{self.shard} among {self.shard_ranks}" if self.uses_shard_groups else self.shard

    def size(self, axis: Axis) -> int:
        """Number of ranks along `axis`."""
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> Coordinates:
        """Where `rank` sits."""
        tp, rank = rank % self.tp, rank // self.tp
        cp, rank = rank % self.cp, rank // self.cp
        return Coordinates(tp, cp, dp=rank % self.dp, pp=rank // self.dp)

    def rank(self, at: Coordinates) -> int:
        """The rank that sits at `at`: the inverse of `coordinates`."""
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def groups(self, axis: Axis) -> list[tuple[int, ...]]:
        """Every group of ranks that differ only along `axis`, each in the order of that axis."""
        stride = 1
        for other in AXES[: AXES.index(axis)]:
            stride *= self.size(other)
        return self._strided(stride, self.size(axis))

    def same_weights_groups(self) -> list[tuple[int, ...]]:
        """Every group of ranks that hold the same part of the model, over dp and cp, nearest ranks together."""
        return self._strided(self.tp, self.replicas)

    def shard_groups(self) -> list[tuple[int, ...]]:
        """Every group of ranks that share out weights, gradients or optimizer states, nearest ranks together."""
        return self._strided(self.tp, self.shard_ranks)

    def shard_group_of(self, rank: int) -> int:
        """Number of the shard group that `rank` belongs to, among those of its place on the other axes."""
        at = self.coordinates(rank)
        return (at.dp * self.cp + at.cp) // self.shard_ranks

    def replica_groups(self) -> list[tuple[int, ...]]:
        """Every group of ranks that hold the same slice: what shard groups sum among each other."""
        return self._strided(self.tp * self.shard_ranks, self.replicas // self.shard_ranks)

    def _strided(self, stride: int, count: int) -> list[tuple[int, ...]]:
        """All ranks in groups of `count`, each rank of a group `stride` behind the one before it."""
        starts = [rank for rank in range(self.world_size) if rank // stride % count == 0]
        return [tuple(start + i * stride for i in range(count)) for start in starts]

    def stage_owner(self, stage: int) -> int:
        """Pipeline rank of virtual stage `stage`: stages go round the pipeline (Narayanan et al. 2104.04473)."""
        return stage % self.pp

    def stages_of(self, pp_rank: int) -> tuple[int, ...]:
        """Virtual stages of one pipeline rank, in model order."""
        return tuple(range(pp_rank, self.num_stages, self.pp))

    def layers_of(self, stage: int) -> range:
        """Decoder layers that virtual stage `stage` holds."""
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])

    def micro_batches(self, global_batch: int) -> int:
        """Micro-batches a data-parallel rank runs in one step; `global_batch` is in sequences."""
        return global_batch // (self.dp * self.micro_batch)

    def groups_crossing_nodes(self, axis: Axis, gpus_per_node: int) -> list[tuple[int, ...]]:
        """Groups of `axis` whose ranks do not all sit in one node."""
        return [group for group in self.groups(axis) if len({rank // gpus_per_node for rank in group}) > 1]

    def __str__(self) -> str:
        parts = [f"tp{self.tp}", f"pp{self.pp}"]
        if self.vpp > 1:
            parts.append(f"vpp{self.vpp}")
        if self.cp > 1:
            parts.append(f"cp{self.cp}")
        return " ".join([*parts, f"dp{self.dp}"])


def context_slices(cp_rank: int, cp: int) -> tuple[int, int]:
    """Which of the 2 cp slices of a sequence a context-parallel rank holds: one of each half, counted from the ends.

    So the queries of every rank see as many keys before them as those of any other; Megatron-Core cuts alike.
    """
    return cp_rank, 2 * cp - 1 - cp_rank


def even_layers(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """The same number of layers on every virtual stage, earlier stages taking one more where it does not divide."""
    base, extra = divmod(num_layers, num_stages)
    return tuple(base + (stage < extra) for stage in range(num_stages))


def balanced_layers(spec: ModelSpec, num_stages: int, seq_len: int) -> tuple[int, ...]:
    """Layers of each virtual stage so that the slowest stage is as fast as it can be.

    The last stage also computes the head, which costs as much as `head / layer` FLOPs say (1.2 layers for
    Llama-3-70B); the embedding is a lookup and costs nothing. Among the maps with the smallest maximum the most
    even one is taken, longer stages first.
    """
    head = spec.head_flops_per_token() / spec.layer_flops_per_token(seq_len, causal=True)
    layers = [0] * num_stages
    last = num_stages - 1
    loads = [(head if stage == last else 0.0, stage) for stage in range(num_stages)]
    heapify(loads)
    for _ in range(spec.num_hidden_layers):
        _, stage = loads[0]
        layers[stage] += 1
        heapreplace(loads, (layers[stage] + (head if stage == last else 0.0), stage))
    # A stage without a layer still moves activations for nothing: give it one from the longest.
    for stage in range(num_stages):
        if layers[stage] == 0 and max(layers) > 1:
            last_longest = num_stages - 1 - layers[::-1].index(max(layers))
            layers[last_longest] -= 1
            layers[stage] = 1
    return tuple(layers)
