"""Machine profiles: read strictly, written and read back, and priced with what they measured."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import triweave
from triweave.cluster import parse_cluster
from triweave.errors import InputError
from triweave.layout import Layout
from triweave.planner.ask import make_request
from triweave.planner.machine import machine_of
from triweave.planner.profile import (
    AttentionTable,
    CollectiveCurve,
    CopyCurve,
    LinkCurve,
    MatmulTable,
    OperationCurve,
    Profile,
    Slowdown,
    profile_text,
    read_profile,
)
from triweave.planner.profile_machine import is_foreign, machine_from_profile, profile_of
from triweave.planner.request import price, time_of
from triweave.planner.time_attention import attention_s
from triweave.planner.time_collectives import GroupShape, all_reduce_s, send_s
from triweave.planner.time_matmul import matmul_s

SHIPPED = Path(triweave.__file__).parent / "planner" / "profiles"
ONE_NODE = parse_cluster("1x2xh200-141gb")
TWO_NODES = parse_cluster("2x1xh200-141gb")
FSDP = Layout(dp=2, shard="full", layers=(32,))

SECONDS = st.floats(1e-6, 10, allow_nan=False)
SIZES = st.integers(1, 2**34)
CURVES = st.dictionaries(SIZES, SECONDS, min_size=1, max_size=4).map(lambda points: tuple(sorted(points.items())))
PROFILES = st.builds(
    Profile,
    version=st.just(2),
    gpu=st.sampled_from(["h100-80gb", "h200-141gb"]),
    torch=st.just("2.11.0"),
    date=st.just("2026-11-29"),
    source=st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=30),
    matmul=st.lists(
        st.builds(
            MatmulTable,
            st.sampled_from(["bf16", "fp8"]),
            st.sampled_from(["NT", "NN", "TN"]),
            st.lists(st.tuples(SIZES, SIZES, SIZES, SECONDS), max_size=3).map(tuple),
        ),
        max_size=3,
    ).map(tuple),
    attention=st.just((AttentionTable("cudnn", ((1, 4096, 8, 1, 128, 1e-4, 3e-4),)),)) | st.just(()),
    parts=st.lists(st.sampled_from(["gemm", "links"]), max_size=2).map(tuple),
    memory_bytes_seconds=CURVES,
    operations=st.lists(st.builds(OperationCurve, st.sampled_from(["swiglu", "layer norms"]), CURVES), max_size=2).map(
        tuple
    ),
    copies=st.lists(st.builds(CopyCurve, st.sampled_from(["slice", "gather"]), st.just(2), CURVES), max_size=2).map(
        tuple
    ),
    collectives=st.lists(
        st.builds(
            CollectiveCurve,
            st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]),
            st.integers(2, 64),
            st.sampled_from(["node", "cluster"]),
            CURVES,
        ),
        max_size=3,
    ).map(tuple),
    point_to_point=st.lists(st.builds(LinkCurve, st.sampled_from(["node", "cluster"]), CURVES), max_size=2).map(tuple),
    slowdowns=st.lists(
        st.builds(Slowdown, st.sampled_from(["copies", "collectives"]), st.floats(0, 1)), max_size=2
    ).map(tuple),
    layers=st.lists(st.tuples(*[st.integers(1, 9)] * 8, *[SECONDS] * 2), max_size=2).map(tuple),
    launch_seconds=st.none() | st.floats(0, 1),
    power_limit_watts=st.none() | st.floats(1, 1000),
    nic_gbit_per_s=st.none() | st.floats(1, 1000),
)


HAND_MADE = Path(__file__).parent / "golden" / "profile_h200.yaml"
"""Thirteen products, two attention kernels, links of two GPUs."""


@pytest.fixture(scope="module")
def shipped() -> Profile:
    return read_profile(HAND_MADE)


@given(PROFILES)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, profile: Profile) -> None:
    """Any profile written as YAML, or dumped as JSON, is the same profile when it is read."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "one.yaml").write_text(profile_text(profile), encoding="utf-8")
    assert read_profile(folder / "one.yaml") == profile
    (folder / "one.yml").write_text(json.dumps(asdict(profile)), encoding="utf-8")
    assert read_profile(folder / "one.yml") == profile


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("version: 2", "version: 1", ["version = 1", "must be 2"]),
        ("version: 2", "version: 2\nspeed: 9", ["speed"]),
        ('gpu: "h200-141gb"', "gpu: h200", ["gpu = h200", "nearest: h200-141gb"]),
        ("[4096, 1280, 8192, 0.000154]", "[4096, 1280, 0.000154]", ["matmul[0].m_n_k_seconds", "4 "]),
        ("[4096, 1280, 8192, 0.000154]", "[4096, 1280, 8192, -0.000154]", ["matmul[0].m_n_k_seconds[0]", "above 0"]),
        ('kind: "all_reduce"', 'kind: "all_reduced"', ["all_reduced", "nearest: all_reduce"]),
        ("version: 2", "version: 2\nnic_gbit_per_s: 0.0", ["nic_gbit_per_s = 0.0", "above 0"]),
        ("ranks: 2", "ranks: 1", ["collectives[0].ranks = 1", "at least 2"]),
        ("[1048576, 3.9e-05]", "[104857600, 3.9e-05]", ["collectives[0].bytes_seconds", "smaller to larger"]),
    ],
)
def test_read_strictly(tmp_path: Path, shipped: Profile, old: str, new: str, told: list[str]) -> None:
    """An unknown key, another version, and what cannot have been measured are refused, by key and value."""
    text = profile_text(shipped)
    assert old in text
    path = tmp_path / "profile.yaml"
    path.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        read_profile(path)
    for words in [*told, str(path)]:
        assert words in str(refused.value)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_profiles_that_come_with_the_package_are_whole(path: Path) -> None:
    """Each is read by its name, is of a GPU, gives its text back, and prices a step of its own GPU within its range."""
    profile = profile_of(path.stem)
    assert path.read_text(encoding="utf-8") == profile_text(profile)
    cluster = parse_cluster(f"1x{max(2, profile.num_gpus)}x{profile.gpu}")
    known = make_request("llama-3.1-8b", str(cluster), 8192, 8)
    request = make_request("llama-3.1-8b", str(cluster), 8192, 8, profile=path.stem)
    layout = Layout(dp=cluster.world_size, shard="optimizer", layers=(32,))
    low, high = time_of(known, layout).range_s
    assert low < time_of(request, layout).step_s < high


def test_a_profile_gives_back_what_was_measured(shipped: Profile) -> None:
    """Products, attention, all-reduces and messages of measured shapes are priced at their measured times."""
    machine = machine_from_profile(shipped, ONE_NODE)
    for table in shipped.matmul:
        for m, n, k, seconds in table.m_n_k_seconds:
            assert matmul_s(machine, m, n, k, table.precision, table.operands) == seconds
    for kernel in shipped.attention:
        for batch, seq, heads, _, head_dim, forward, backward in kernel.shape_forward_backward_seconds:
            priced = attention_s(machine, kernel.kernel, batch, seq, heads, head_dim)
            assert priced == pytest.approx((forward, backward))
    (reduce,) = [curve for curve in shipped.collectives if curve.kind == "all_reduce"]
    for size, seconds in reduce.bytes_seconds:
        assert all_reduce_s(machine, GroupShape(2, 2), size) == pytest.approx(seconds)
    for size, seconds in shipped.point_to_point[0].bytes_seconds:
        assert send_s(machine, size, crosses_nodes=False) == pytest.approx(seconds)


def test_what_was_measured_between_nodes_is_priced(shipped: Profile) -> None:
    """A message and a small sum over two nodes take what was measured, over the port that they were measured on."""
    size, seconds = 2**26, 2**26 / 20e9
    own = replace(
        shipped,
        nic_gbit_per_s=200,
        point_to_point=(LinkCurve("cluster", ((4, 3e-5), (size, seconds))),),
        collectives=(*shipped.collectives, CollectiveCurve("all_reduce", 2, "cluster", ((4, 8e-5),))),
    )
    like_it = replace(TWO_NODES, gpu=replace(TWO_NODES.gpu, nic_bandwidth=25e9))
    machine = machine_from_profile(own, like_it)
    assert send_s(machine, size, crosses_nodes=True) == pytest.approx(seconds + 3e-5, rel=1e-3)
    assert send_s(machine, 4, crosses_nodes=True) == pytest.approx(3e-5, rel=1e-3)
    assert all_reduce_s(machine, GroupShape(2, 1), 4) == pytest.approx(8e-5, rel=1e-3)
    # A link of half the speed takes twice as long, whether or not anything else is known of such a card.
    half = replace(like_it, gpu=replace(like_it.gpu, nic_bandwidth=12.5e9))
    slower = machine_from_profile(own, half)
    assert send_s(slower, size, crosses_nodes=True) == pytest.approx(2 * seconds + 3e-5, rel=1e-3)


def test_the_network_of_a_cluster_file_reaches_a_card_that_only_a_profile_knows(shipped: Profile) -> None:
    """Of a GPU without speeds of its own the network is the cluster's too."""
    cluster = parse_cluster("2x2xa100-pcie-80gb")
    slow = replace(cluster, gpu=replace(cluster.gpu, nic_bandwidth=cluster.gpu.nic_bandwidth / 10), rails=1)
    own = replace(shipped, gpu="a100-pcie-80gb")
    usual, slower = (machine_from_profile(own, one).nic_bytes_per_s for one in (cluster, slow))
    assert usual == pytest.approx(20 * slower)


def test_an_empty_profile_changes_nothing(shipped: Profile) -> None:
    """What a profile does not hold stays as it is known of the GPU."""
    empty = replace(
        shipped,
        matmul=(),
        attention=(),
        memory_bytes_seconds=(),
        host_copy_bytes_seconds=(),
        collectives=(),
        point_to_point=(),
    )
    known = make_request("llama-3.1-8b", str(ONE_NODE), 8192, 8)
    request = replace(known, profile=empty, on=machine_from_profile(empty, ONE_NODE))
    assert time_of(request, FSDP) == time_of(known, FSDP)


def test_a_slower_machine_takes_longer(shipped: Profile) -> None:
    """Twice the seconds of every product make the step longer, by less than twice."""
    slow = replace(
        shipped,
        matmul=tuple(
            replace(table, m_n_k_seconds=tuple((m, n, k, 2 * seconds) for m, n, k, seconds in table.m_n_k_seconds))
            for table in shipped.matmul
        ),
    )

    def step(profile: Profile) -> float:
        request = make_request("llama-3.1-8b", str(ONE_NODE), 8192, 8)
        return time_of(replace(request, profile=profile, on=machine_from_profile(profile, ONE_NODE)), FSDP).step_s

    assert step(shipped) < step(slow) < 2 * step(shipped)


def test_a_profile_of_another_gpu_widens_the_range(shipped: Profile) -> None:
    """It is said, and the range beside the step is twice as wide in logarithms."""
    cluster = parse_cluster("1x2xh100-80gb")
    assert is_foreign(shipped, cluster)
    request = make_request("llama-3.1-8b", str(cluster), 4096, 8, profile=str(HAND_MADE))
    layout = replace(FSDP, recompute=("layer",))
    one = price(request, layout).time
    narrow = price(replace(request, profile=None), layout).time
    assert one.step_s == narrow.step_s
    assert one.range_s[1] / one.step_s == pytest.approx((narrow.range_s[1] / narrow.step_s) ** 2)
    assert one.range_s[0] / one.step_s == pytest.approx((narrow.range_s[0] / narrow.step_s) ** 2)


def test_an_unknown_gpu_needs_products_and_links(shipped: Profile) -> None:
    """Of a GPU that nothing is known of, a profile with products and an all-reduce is enough, and less is refused."""
    cluster = parse_cluster("1x2xa100-pcie-80gb")
    own = replace(shipped, gpu="a100-pcie-80gb")
    machine = machine_from_profile(own, cluster)
    assert matmul_s(machine, 8192, 8192, 8192, "bf16", "NT") == pytest.approx(1.639e-3, rel=0.02)
    with pytest.raises(InputError, match="matmul points and an all_reduce"):
        machine_from_profile(replace(own, collectives=()), cluster)
    with pytest.raises(InputError, match="no measured speeds"):
        machine_of(cluster)
