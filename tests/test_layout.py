"""The grid: ranks, groups and layer maps, as properties over any sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.errors import divisors
from triweave.layout import AXES, Axis, Coordinates, Layout, balanced_layers
from triweave.model_spec import ModelSpec

LLAMA_70B = ModelSpec(128256, 8192, 28672, 80, 64, 8, 128)

SIZES = st.integers(1, 5)
GRIDS = st.builds(Layout, tp=SIZES, cp=st.integers(1, 3), dp=SIZES, pp=SIZES)


def place(at: Coordinates) -> dict[Axis, int]:
    """Coordinates by axis."""
    return {"tp": at.tp, "cp": at.cp, "dp": at.dp, "pp": at.pp}


class TestGrid:
    @given(layout=GRIDS)
    def test_every_rank_has_its_own_place(self, layout: Layout) -> None:
        """Coordinates and rank are each other's inverse, and every place of the grid is taken once."""
        places = [layout.coordinates(rank) for rank in range(layout.world_size)]
        assert [layout.rank(at) for at in places] == list(range(layout.world_size))
        assert len(set(places)) == layout.world_size == layout.tp * layout.cp * layout.dp * layout.pp
        for axis in AXES:
            assert {place(at)[axis] for at in places} == set(range(layout.size(axis)))

    @given(layout=GRIDS, axis=st.sampled_from(AXES))
    def test_groups_partition_the_ranks(self, layout: Layout, axis: Axis) -> None:
        """Every rank is in one group an axis, whose members differ along that axis alone and stand in its order."""
        groups = layout.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(layout.world_size))
        for group in groups:
            places = [place(layout.coordinates(rank)) for rank in group]
            assert [at.pop(axis) for at in places] == list(range(layout.size(axis)))
            assert all(at == places[0] for at in places)

    @given(layout=GRIDS, data=st.data())
    def test_shard_groups_and_replica_groups(self, layout: Layout, data: st.DataObject) -> None:
        """Both partition the ranks; two ranks share a group of each kind only with themselves, and never leave their
        tensor rank or stage; with everything shared, a shard group is all that hold the same weights."""
        group = data.draw(st.sampled_from([None, *divisors(layout.replicas)]))
        layout = replace(layout, shard="full", shard_group=group)
        shards, replicas = layout.shard_groups(), layout.replica_groups()
        for groups, size in ((shards, layout.shard_ranks), (replicas, layout.replicas // layout.shard_ranks)):
            assert sorted(rank for one in groups for rank in one) == list(range(layout.world_size))
            assert {len(one) for one in groups} == {size}
        for one in shards:
            assert len({(at.tp, at.pp) for at in map(layout.coordinates, one)}) == 1
            assert all(len(set(one) & set(other)) <= 1 for other in replicas)
        for one in replicas:
            assert len({(at.tp, at.pp) for at in map(layout.coordinates, one)}) == 1

    @given(layout=GRIDS)
    def test_near_and_far(self, layout: Layout) -> None:
        """Tensor-parallel ranks are adjacent; pipeline stages are blocks of ranks, so they are the farthest apart."""
        for group in layout.groups("tp"):
            assert group == tuple(range(group[0], group[0] + layout.tp))
        stage = layout.world_size // layout.pp
        for group in layout.groups("pp"):
            assert [rank // stage for rank in group] == list(range(layout.pp))

    def test_four_nodes_of_eight(self) -> None:
        """Llama-3-70B on 4 x 8: tensor groups fill the nodes, and each pipeline goes through all of them."""
        layout = Layout(tp=8, pp=4)
        assert layout.groups("tp")[1] == tuple(range(8, 16))
        assert layout.groups("pp")[3] == (3, 11, 19, 27)
        assert layout.groups_crossing_nodes("tp", 8) == []
        assert layout.groups_crossing_nodes("pp", 8) == layout.groups("pp")
        assert layout.groups_crossing_nodes("tp", 12) == [tuple(range(8, 16))]

    @pytest.mark.parametrize(
        ("layout", "text"),
        [
            (Layout(), "tp1 pp1 dp1"),
            (Layout(tp=8, pp=4, dp=2), "tp8 pp4 dp2"),
            (Layout(tp=8, pp=4, vpp=5, cp=2, dp=2), "tp8 pp4 vpp5 cp2 dp2"),
        ],
    )
    def test_text(self, layout: Layout, text: str) -> None:
        """A layout prints as its axes; those that few runs use are left out at 1."""
        assert str(layout) == text

    @pytest.mark.parametrize(
        ("layout", "splits"),
        [(Layout(tp=2), True), (Layout(tp=2, sequence_parallel=False), False), (Layout(tp=1), False)],
    )
    def test_one_tensor_rank_splits_no_sequence(self, layout: Layout, splits: bool) -> None:
        """Sequence parallelism, which is on by default, means nothing with a single tensor-parallel rank."""
        assert layout.uses_sequence_parallel is splits

    @given(layout=GRIDS, micro_batch=st.integers(1, 4), count=st.integers(1, 9))
    def test_micro_batches(self, layout: Layout, micro_batch: int, count: int) -> None:
        """The global batch is micro-batch x micro-batches x data-parallel ranks, in sequences."""
        layout = Layout(layout.tp, layout.pp, cp=layout.cp, dp=layout.dp, micro_batch=micro_batch)
        assert layout.micro_batches(count * micro_batch * layout.dp) == count


class TestStages:
    @given(pp=SIZES, vpp=st.integers(1, 4), data=st.data())
    def test_stages_hold_every_layer_once(self, pp: int, vpp: int, data: st.DataObject) -> None:
        """Virtual stages go round the pipeline, and together they hold all layers, once and in order."""
        layers = tuple(data.draw(st.lists(st.integers(0, 5), min_size=pp * vpp, max_size=pp * vpp)))
        layout = Layout(pp=pp, vpp=vpp, layers=layers)
        assert [layer for stage in range(layout.num_stages) for layer in layout.layers_of(stage)] == list(
            range(sum(layers))
        )
        owned = [stage for rank in range(pp) for stage in layout.stages_of(rank)]
        assert sorted(owned) == list(range(layout.num_stages))
        for rank in range(pp):
            assert {layout.stage_owner(stage) for stage in layout.stages_of(rank)} == {rank}
            assert len(layout.stages_of(rank)) == vpp

    @pytest.mark.parametrize(
        ("num_stages", "layers"),
        [
            (2, (41, 39)),
            (4, (21, 20, 20, 19)),  # even stages of 20 would end in one of 20 + 1.17
            (8, (11, 10, 10, 10, 10, 10, 10, 9)),
        ],
    )
    def test_llama_70b_balanced(self, num_stages: int, layers: tuple[int, ...]) -> None:
        """The head of Llama-3-70B weighs 1.17 layers at sequence 4096, so the last stage takes one layer less."""
        head = LLAMA_70B.head_flops_per_token() / LLAMA_70B.layer_flops_per_token(4096, causal=True)
        assert head == pytest.approx(1.17, abs=0.02)
        assert balanced_layers(LLAMA_70B, num_stages, 4096) == layers

    @given(
        num_layers=st.integers(1, 60),
        num_stages=st.integers(1, 16),
        vocab_size=st.sampled_from([10, 32000, 128256, 10**6]),
    )
    def test_no_stage_is_empty(self, num_layers: int, num_stages: int, vocab_size: int) -> None:
        """Balanced maps hold every layer once and leave no stage without one, however heavy the head is."""
        spec = ModelSpec(vocab_size, 1024, 4096, num_layers, 8, 8, 128)
        layers = balanced_layers(spec, num_stages, 2048)
        assert sum(layers) == num_layers
        assert len(layers) == num_stages
        assert min(layers) >= min(1, num_layers // num_stages)
