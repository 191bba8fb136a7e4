"""A Llama in numbers: what is read from a config.json, what it counts, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import STYLES, tiny_llama
from transformers import AutoConfig, AutoModelForCausalLM

from triweave.errors import InputError
from triweave.model_spec import ARCHITECTURES, ModelSpec, RopeScaling, spec_from_folder, spec_from_hf_config

LLAMA_2_7B = ModelSpec(32000, 4096, 11008, 32, 32, 32, 128)
LLAMA_3_8B = ModelSpec(128256, 4096, 14336, 32, 32, 8, 128)
LLAMA_3_70B = ModelSpec(128256, 8192, 28672, 80, 64, 8, 128)
LLAMA_3_405B = ModelSpec(128256, 16384, 53248, 126, 128, 8, 128)
SMOLLM2_135M = ModelSpec(49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True)
QWEN_2_7B = ModelSpec(152064, 3584, 18944, 28, 28, 4, 128, attention_bias=True)

SMALLEST: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
LLAMA_3_1_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def told(config: dict[str, Any]) -> list[str]:
    """Every problem of a config that must be refused."""
    with pytest.raises(InputError) as refused:
        spec_from_hf_config(config)
    return [str(problem) for problem in refused.value.problems]


class TestCounts:
    @pytest.mark.parametrize(
        ("spec", "parameters"),
        [
            (LLAMA_2_7B, 6_738_415_616),
            (LLAMA_3_8B, 8_030_261_248),
            (LLAMA_3_70B, 70_553_706_496),
            (LLAMA_3_405B, 405_853_388_800),
            (SMOLLM2_135M, 134_515_008),
            (QWEN_2_7B, 7_615_616_512),
        ],
        ids=["Llama-2-7B", "Llama-3-8B", "Llama-3-70B", "Llama-3-405B", "SmolLM2-135M", "Qwen2-7B"],
    )
    def test_published_models(self, spec: ModelSpec, parameters: int) -> None:
        """Parameter counts of published checkpoints come out to the last one."""
        assert spec.num_parameters == parameters

    @given(
        kind=st.sampled_from(["llama", "mistral", "qwen2"]),
        vocab_size=st.integers(1, 300),
        head_dim=st.integers(1, 8).map(lambda half: 2 * half),
        kv_heads=st.integers(1, 3),
        group=st.integers(1, 3),
        intermediate_size=st.integers(1, 100),
        layers=st.integers(1, 3),
        tied=st.booleans(),
    )
    def test_every_tensor_is_transformers_own(
        self, kind: str, vocab_size: int, kv_heads: int, group: int, layers: int, tied: bool, **sizes: int
    ) -> None:
        """Names and shapes of all parameters are those of the model that transformers builds from the same config."""
        heads = kv_heads * group
        config = AutoConfig.for_model(
            kind,
            vocab_size=vocab_size,
            hidden_size=heads * 10,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            tie_word_embeddings=tied,
            pad_token_id=None,
            **sizes,
        )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        spec = spec_from_hf_config(config.to_dict() | {"architectures": [type(model).__name__]})
        theirs = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        assert {tensor.name: tensor.shape for tensor in spec.tensors()} == theirs
        assert spec.num_parameters == model.num_parameters()
        matrices = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
        assert spec.layer_matmul_parameters == matrices

    def test_flops_in_every_convention(self) -> None:
        """GFLOPs a token of Llama-3-70B at sequence 8192, in the conventions that published MFUs divide by.

        481.4 is torchtitan's and NVIDIA's until 2025, 449.2 Megatron's since (causal attention), 487.7 PaLM's (which
        counts the embedding too); 423.3 is six times all parameters.
        """
        full, causal = (LLAMA_3_70B.flops_per_token(8192, causal=counted) / 1e9 for counted in (False, True))
        assert full == pytest.approx(481.4, abs=0.05)
        assert causal == pytest.approx(449.2, abs=0.05)
        embedding = LLAMA_3_70B.head_flops_per_token() / 1e9
        assert full + embedding == pytest.approx(487.7, abs=0.05)
        attention = 12 * 80 * 8192 * 8192 / 1e9
        assert full + embedding - attention == pytest.approx(423.3, abs=0.05)
        assert full - causal == pytest.approx(attention / 2)

    @pytest.mark.parametrize("spec", [LLAMA_2_7B, LLAMA_3_8B, SMOLLM2_135M])
    def test_six_flops_a_weight(self, spec: ModelSpec) -> None:
        """Without attention, FLOPs are six a parameter, but for norms and a lookup that is not the head too."""
        products = spec.flops_per_token(0, causal=True)
        embedding = 0 if spec.tie_word_embeddings else spec.vocab_size * spec.hidden_size
        idle = embedding + (2 * spec.num_hidden_layers + 1) * spec.hidden_size
        assert products == 6 * (spec.num_parameters - idle)


class TestReading:
    @pytest.mark.parametrize("style", STYLES)
    def test_folder_that_transformers_wrote(self, style: str, tmp_path: Path) -> None:
        """Every field of the spec is what transformers reads from the same folder."""
        folder = tiny_llama(tmp_path / "model", **STYLES[style])
        spec, config = spec_from_folder(folder), AutoConfig.from_pretrained(folder)
        same = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        same += ("num_key_value_heads", "tie_word_embeddings", "rms_norm_eps", "max_position_embeddings")
        same += ("initializer_range",)
        for key in same:
            assert getattr(spec, key) == getattr(config, key), key
        assert spec.head_dim == (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        assert spec.rope_theta == config.rope_parameters["rope_theta"]
        assert spec.architecture == config.architectures[0]
        assert (spec.rope_scaling is None) == (config.rope_parameters["rope_type"] == "default")
        if spec.rope_scaling is not None:
            assert spec.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 32)

    @pytest.mark.parametrize("architecture", ARCHITECTURES)
    def test_keys_left_out(self, architecture: str) -> None:
        """A key that the config leaves out has the value that transformers gives it, which differs by architecture."""
        config = SMALLEST | {"architectures": [architecture]}
        spec = spec_from_hf_config(config)
        theirs = AutoConfig.for_model(architecture.removesuffix("ForCausalLM").lower(), **SMALLEST)
        same = ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings")
        for key in (*same, "initializer_range"):
            assert getattr(spec, key) == getattr(theirs, key), key
        assert spec.sliding_window == getattr(theirs, "sliding_window", None)
        assert spec.rope_theta == theirs.rope_parameters["rope_theta"]

    @pytest.mark.parametrize(
        ("keys", "theta", "scaling"),
        [
            ({"rope_theta": 500000.0}, 500000.0, None),
            ({"rope_theta": 500000, "rope_scaling": None}, 500000.0, None),
            ({"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}, 7.0, None),
            ({"rope_theta": 7.0, "rope_scaling": {"type": "default"}}, 7.0, None),
            ({"rope_theta": 5e5, "rope_scaling": LLAMA_3_1_ROPE}, 5e5, RopeScaling(8.0, 1.0, 4.0, 8192)),
            ({"rope_parameters": {**LLAMA_3_1_ROPE, "rope_theta": 5e5}}, 5e5, RopeScaling(8.0, 1.0, 4.0, 8192)),
        ],
    )
    def test_rope_in_both_spellings(self, keys: dict[str, Any], theta: float, scaling: RopeScaling | None) -> None:
        """Rotary settings are read as transformers 4 wrote them and as transformers 5 does."""
        spec = spec_from_hf_config(SMALLEST | keys)
        assert (spec.rope_theta, spec.rope_scaling) == (theta, scaling)

    def test_null_is_left_out(self) -> None:
        """An explicit null means the same as a missing key; of Mistral's window it means that there is none."""
        keys = ("head_dim", "num_key_value_heads", "rms_norm_eps", "rope_scaling", "rope_theta", "architectures")
        assert spec_from_hf_config(SMALLEST | dict.fromkeys(keys)) == spec_from_hf_config(SMALLEST)
        mistral = SMALLEST | {"architectures": ["MistralForCausalLM"]}
        assert spec_from_hf_config(mistral | {"sliding_window": None}).sliding_window is None
        assert spec_from_hf_config(mistral).sliding_window == 4096


class TestRefused:
    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            (
                {"architectures": ["GPT2LMHeadModel"]},
                "architectures = GPT2LMHeadModel: is not one of Llama",
            ),
            ({"hidden_act": "gelu"}, "hidden_act = gelu: must be silu: the MLP is SwiGLU; nearest: silu"),
            ({"mlp_bias": True}, "mlp_bias = True: is not supported; nearest: false"),
            ({"use_sliding_window": True}, "use_sliding_window = True: is not supported; nearest: false"),
            ({"attention_bias": True}, "attention_bias = True: puts a bias on o_proj, which is not supported"),
            ({"attention_dropout": 0.1}, "attention_dropout = 0.1: must be 0: Llama trains without dropout"),
            ({"vocab_size": None}, "vocab_size: must be a positive whole number"),
            ({"num_hidden_layers": 0}, "num_hidden_layers = 0: must be a positive whole number"),
            ({"hidden_size": "64"}, "hidden_size = 64: must be a positive whole number"),
            ({"num_hidden_layers": True}, "num_hidden_layers = True: must be a positive whole number"),
            ({"num_key_value_heads": 5}, "num_key_value_heads = 5: must divide num_attention_heads = 32"),
            ({"num_key_value_heads": -8}, "num_key_value_heads = -8: must be a positive whole number"),
            ({"hidden_size": 100}, "hidden_size = 100: must be a multiple of num_attention_heads = 32, or head_dim"),
            ({"head_dim": 5}, "head_dim = 5: is 5 and must be even: rotary embedding turns pairs"),
            ({"hidden_size": 32}, "head_dim: is 1 and must be even"),
            ({"rms_norm_eps": "small"}, "rms_norm_eps = small: must be a positive number"),
            ({"rope_theta": -1}, "rope_theta = -1: must be a positive number"),
            ({"tie_word_embeddings": "false"}, "tie_word_embeddings = false: must be true or false"),
            ({"rope_scaling": "linear"}, "rope_scaling = linear: must be an object"),
            ({"rope_scaling": {"type": "linear"}}, "rope_scaling.type = linear: must be default or llama3"),
            ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.rope_type = yarn: must be default or llama3"),
            (
                {"rope_scaling": LLAMA_3_1_ROPE | {"high_freq_factor": 1.0}},
                "rope_scaling.high_freq_factor = 1.0: must be more than low_freq_factor = 1.0",
            ),
            ({"rope_scaling": LLAMA_3_1_ROPE | {"factor": None}}, "rope_scaling.factor: must be a positive number"),
        ],
    )
    def test_one_wrong_value(self, keys: dict[str, Any], message: str) -> None:
        """One wrong value is one problem, which names the file, the key, the value and the rule."""
        (problem,) = told(SMALLEST | keys)
        assert problem.startswith(f"config.json: {message}")

    def test_all_at_once(self) -> None:
        """Everything that is wrong is told together."""
        wrong = {"vocab_size": 0, "hidden_act": "relu", "rope_scaling": {"type": "linear"}, "rms_norm_eps": 0}
        assert len(told({**SMALLEST, **wrong, "architectures": ["Other"]})) == 5

    def test_biased_projections_are_qwens(self) -> None:
        """Qwen2 has its biases whether or not its config says so; Llama's `attention_bias` is another thing."""
        assert spec_from_hf_config(SMALLEST | {"architectures": ["Qwen2ForCausalLM"]}).attention_bias
        assert not spec_from_hf_config(SMALLEST | {"attention_bias": False}).attention_bias

    @given(
        config=st.dictionaries(
            st.sampled_from(
                [
                    *(*SMALLEST, *LLAMA_3_1_ROPE, "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta"),
                    *("rope_scaling", "rope_parameters", "max_position_embeddings", "initializer_range", "hidden_act"),
                    *("sliding_window", "tie_word_embeddings", "attention_bias", "attention_dropout"),
                ]
            ),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers(-2, 64)
                | st.floats()
                | st.sampled_from(["", "x", "llama3", "MistralForCausalLM"]),
                lambda inner: (
                    st.lists(inner, max_size=2)
                    | st.dictionaries(st.sampled_from([*LLAMA_3_1_ROPE, "type", "rope_theta"]), inner)
                ),
                max_leaves=6,
            ),
        ),
        whole=st.booleans(),
    )
    def test_any_json_is_read_or_refused(self, config: dict[str, Any], whole: bool) -> None:
        """Whatever JSON a config holds, it gives a model with positive sizes or an input error, never a traceback."""
        try:
            spec = spec_from_hf_config(SMALLEST | config if whole else config)
        except InputError:
            return
        assert spec.num_parameters > 0
        assert spec.flops_per_token(8, causal=True) > 0
        assert spec.head_dim % 2 == 0
        assert spec.num_attention_heads % spec.num_key_value_heads == 0

    @pytest.mark.parametrize(
        ("content", "says"),
        [
            (None, "has no config.json"),
            ("{", "is not JSON"),
            ("[1]", "that is not a JSON object"),
            ("\xff", "is not JSON"),
        ],
    )
    def test_folder_without_a_model(self, content: str | None, says: str, tmp_path: Path) -> None:
        """A folder without a readable config.json is named, and so is what is wrong with it."""
        if content is not None:
            (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
        with pytest.raises(InputError, match=says) as refused:
            spec_from_folder(tmp_path)
        assert str(tmp_path) in str(refused.value)
        with pytest.raises(InputError, match="is not a folder"):
            spec_from_folder(tmp_path / "missing")

    def test_file_is_named(self, tmp_path: Path) -> None:
        """A problem inside a config.json starts with that file's path."""
        (tmp_path / "config.json").write_text(json.dumps(SMALLEST | {"hidden_size": 0}), encoding="utf-8")
        with pytest.raises(InputError, match="hidden_size = 0") as refused:
            spec_from_folder(tmp_path)
        assert str(refused.value).startswith(str(tmp_path / "config.json"))
