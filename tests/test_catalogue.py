"""Models and machines by name: exact counts, forgiving names, strict files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.catalogue import find_model, models
from triweave.cluster import CATALOGUE, ClusterConfig, Gpu, GpuConfig, cluster_from_config, parse_cluster
from triweave.config.load import load
from triweave.errors import InputError
from triweave.model_spec import ModelSpec, spec_from_hf_config

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo-2407": 12_247_782_400,
    "mistral-small-2409": 22_247_282_688,
    "mistral-small-24b-2501": 23_572_403_200,
    "mistral-large-2407": 122_610_069_504,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm-135m": 134_515_008,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
}
"""Numbers of elements that the models' own files hold."""


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_counts_are_the_published_ones(name: str, parameters: int) -> None:
    """A model of the catalogue has exactly as many parameters as its weights."""
    assert find_model(name).num_parameters == parameters


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("LLAMA3.1_405B", "llama-3.1-405b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("mistralai/Mistral-Nemo-Base-2407", "mistral-nemo-2407"),
        ("Qwen/Qwen2.5-32B", "qwen2.5-32b"),
        ("HuggingFaceTB/SmolLM2-1.7B-Instruct", "smollm2-1.7b"),
    ],
)
def test_names_of_hugging_face_are_understood(written: str, name: str) -> None:
    """Owner, case, separators and variant words of a name do not matter."""
    assert find_model(written) == models()[name]


def test_a_typo_is_answered_with_the_nearest_name() -> None:
    """An unknown model is one problem that names the nearest one."""
    with pytest.raises(InputError) as refused:
        find_model("lama-3.1-70b")
    (problem,) = refused.value.problems
    assert problem.nearest == "llama-3.1-70b"


def test_no_two_names_collide() -> None:
    """Every name of the catalogue finds itself."""
    assert all(find_model(name) is spec for name, spec in models().items())


def test_priced_models_are_not_trained() -> None:
    """A Qwen3 config is refused: its query and key norms are priced, not computed."""
    with pytest.raises(InputError, match="Qwen3ForCausalLM"):
        spec_from_hf_config({"architectures": ["Qwen3ForCausalLM"]})


def test_an_ungated_mlp_has_two_matrices() -> None:
    """GPT's MLP counts two matrices a layer where SwiGLU counts three."""
    gated = ModelSpec(100, 64, 256, 2, 4, 4, 16)
    plain = ModelSpec(100, 64, 256, 2, 4, 4, 16, gated_mlp=False)
    assert gated.num_parameters - plain.num_parameters == 2 * 64 * 256
    assert gated.layer_matmul_parameters - plain.layer_matmul_parameters == 64 * 256


SMALL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 10**6),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
) | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)


@given(
    key=st.sampled_from(
        [*SMALL, "head_dim", "rope_theta", "rms_norm_eps", "sliding_window", "tie_word_embeddings", "hidden_act"]
    ),
    value=ANYTHING,
    architecture=st.sampled_from(["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"]),
)
def test_a_value_of_any_type_is_read_or_refused(key: str, value: Any, architecture: str) -> None:
    """Whatever JSON holds under a key, a config is read or refused with a message, never a crash."""
    config = {**SMALL, "architectures": [architecture], key: value}
    with suppress(InputError):
        assert isinstance(spec_from_hf_config(config), ModelSpec)


def test_a_number_in_quotes_is_refused() -> None:
    """`num_key_value_heads` as a string is one problem that names the key."""
    with pytest.raises(InputError) as refused:
        spec_from_hf_config({**SMALL, "rope_scaling": None, "num_key_value_heads": "2"})
    assert [problem.key for problem in refused.value.problems] == ["num_key_value_heads"]


# --- machines ---------------------------------------------------------------------------------------------------------


def test_every_gpu_is_whole() -> None:
    """Every GPU of the catalogue has all its figures, and no more memory than it was sold with."""
    for name, gpu in CATALOGUE.items():
        if name == "cpu":
            continue
        assert gpu.name == name
        assert 0.95 * gpu.memory_bytes < gpu.usable_bytes <= gpu.memory_bytes
        assert min(gpu.peak_flops, gpu.memory_bandwidth, gpu.num_sms, gpu.pcie_bandwidth, gpu.nic_bandwidth) > 0
        assert (gpu.nvlink_bandwidth == 0) == ("pcie" in name)


@pytest.mark.parametrize(
    ("text", "domain"),
    [
        ("4x8xh100-80gb", 8),
        ("1x4xh100-80gb", 4),
        ("2x4xh100-80gb", 4),
        ("36x4xgb200-186gb", 72),
        ("2x4xgb200-186gb", 8),
        ("2x8xa100-pcie-80gb", 1),
    ],
)
def test_nvlink_domain(text: str, domain: int) -> None:
    """NVLink joins a node, or a whole NVL72 rack, or nothing over PCIe."""
    assert parse_cluster(text).nvlink_domain == domain


def test_a_cluster_file_changes_what_it_names(tmp_path: Path) -> None:
    """A file takes a GPU of the catalogue and changes the figures it gives, in its own units."""
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: 4\ngpus_per_node: 8\nrails: 4\ngpu: {name: h100-80gb, nic_gbit_per_s: 200}\n")
    cluster = cluster_from_config(load(ClusterConfig, path), path)
    assert (cluster.world_size, cluster.num_rails) == (32, 4)
    assert cluster.gpu.nic_bandwidth == 25e9
    assert cluster.gpu.peak_flops == CATALOGUE["h100-80gb"].peak_flops


def test_a_cluster_file_is_read_strictly(tmp_path: Path) -> None:
    """An unknown key and a number in words are refused, with file and line."""
    path = tmp_path / "cluster.yaml"
    path.write_text("nodes: four\ngpus_per_nod: 8\ngpu: {name: h100-80gb}\n")
    with pytest.raises(InputError) as refused:
        load(ClusterConfig, path)
    told = str(refused.value)
    assert "nodes" in told
    assert "gpus_per_nod" in told
    assert f"{path}:1" in told


def test_an_unknown_gpu_needs_its_figures() -> None:
    """A GPU that the catalogue does not hold is described by its own numbers, or refused."""
    with pytest.raises(InputError) as refused:
        cluster_from_config(ClusterConfig(0, 8, GpuConfig("h100-80g", memory_tb_per_s=-1)))
    assert {problem.key for problem in refused.value.problems} == {"nodes", "gpu.memory_bandwidth", "gpu.name"}
    assert any(problem.nearest == "h100-80gb" for problem in refused.value.problems)
    own = cluster_from_config(ClusterConfig(1, 8, GpuConfig("mi300x", memory_gib=192, bf16_tflops=1307)))
    assert own.gpu == Gpu("mi300x", 192 * 2**30, 1307e12, usable_bytes=192 * 2**30, context_bytes=own.gpu.context_bytes)
