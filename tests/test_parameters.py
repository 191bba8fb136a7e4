"""Which slice of which tensor every rank holds: all of them together are the model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from triweave.layout import Coordinates, Layout, even_layers
from triweave.model_spec import ModelSpec
from triweave.parameters import (
    LocalParameter,
    first_kv_head,
    has_tied_copy,
    kv_replicas,
    stage_parameters,
    vocab_rows,
)

LLAMA_70B = ModelSpec(128256, 8192, 28672, 80, 64, 8, 128)


@st.composite
def models_and_layouts(draw: st.DrawFn) -> tuple[ModelSpec, Layout]:
    """A small model and a grid that may hold it, with more tensor ranks than key/value heads among them."""
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    kv_heads = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6, 8, 16) if n % tp == 0 or tp % n == 0]))
    heads = draw(st.integers(1, 2)) * max(tp, kv_heads)
    if heads % kv_heads:
        heads = tp * kv_heads
    pp, vpp = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    layers = draw(st.integers(pp * vpp, 9))
    spec = ModelSpec(
        vocab_size=draw(st.integers(1, 70)),
        hidden_size=draw(st.integers(1, 9)),
        intermediate_size=tp * draw(st.integers(1, 4)),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
    )
    return spec, Layout(tp, pp, vpp, sequence_parallel=draw(st.booleans()), layers=even_layers(layers, pp * vpp))


def of_rank(spec: ModelSpec, layout: Layout, rank: int) -> list[LocalParameter]:
    """All parameters of one rank."""
    at = layout.coordinates(rank)
    return [p for stage in layout.stages_of(at.pp) for p in stage_parameters(spec, layout, stage, at.tp)]


class TestPieces:
    @given(case=models_and_layouts())
    def test_every_element_is_held(self, case: tuple[ModelSpec, Layout]) -> None:
        """All ranks' pieces cover each element of each tensor `replicas` times, and a tied copy once more."""
        spec, layout = case
        held = {tensor.name: np.zeros(tensor.shape, int) for tensor in spec.tensors()}
        replicas: dict[str, int] = {}
        for rank in range(layout.world_size):
            for parameter in of_rank(spec, layout, rank):
                for piece in parameter.pieces:
                    window = [slice(None)] * len(piece.shape)
                    window[piece.dim] = slice(piece.start, piece.stop)
                    assert held[piece.name].shape == piece.shape
                    assert held[piece.name][tuple(window)].shape == piece.local_shape
                    held[piece.name][tuple(window)] += 1
                    assert replicas.setdefault(piece.name, piece.replicas) == piece.replicas
        for name, times in held.items():
            copies = 2 if name == "model.embed_tokens.weight" and has_tied_copy(spec, layout) else 1
            assert set(times.flat) == {copies * replicas[name]}, name

    @given(case=models_and_layouts())
    def test_pieces_fill_the_parameter(self, case: tuple[ModelSpec, Layout]) -> None:
        """A parameter's pieces lie end to end in its rows and fill it, but for padding at the end of a vocabulary."""
        spec, layout = case
        for rank in range(layout.world_size):
            for parameter in of_rank(spec, layout, rank):
                end = 0
                for piece in parameter.pieces:
                    assert piece.offset == end
                    end += piece.local_shape[0]
                    assert piece.local_shape[1:] == parameter.shape[1:]
                assert parameter.numel == np.prod(parameter.shape)
                assert end <= parameter.shape[0]
                assert end == parameter.shape[0] or parameter.unit in ("embed", "head")

    @given(case=models_and_layouts())
    def test_ranks_hold_equal_shares(self, case: tuple[ModelSpec, Layout]) -> None:
        """Tensor-parallel ranks of a stage hold parameters of the same names, shapes and units, in the same order."""
        spec, layout = case
        for stage in range(layout.num_stages):
            shares = [
                [(p.name, p.shape, p.unit, p.decay) for p in stage_parameters(spec, layout, stage, tp_rank)]
                for tp_rank in range(layout.tp)
            ]
            assert all(share == shares[0] for share in shares)

    @given(case=models_and_layouts())
    def test_sum_of_all_ranks(self, case: tuple[ModelSpec, Layout]) -> None:
        """What all ranks hold is the model, plus replicas, plus the tied copy, plus the vocabulary's padding."""
        spec, layout = case
        held = sum(p.numel for rank in range(layout.world_size) for p in of_rank(spec, layout, rank))
        norms = (2 * spec.num_hidden_layers + 1) * spec.hidden_size
        bias = 1 if spec.attention_bias else 0
        key_value = 2 * spec.num_hidden_layers * spec.key_value_size * (spec.hidden_size + bias)
        vocabularies = 1 if spec.tie_word_embeddings and not has_tied_copy(spec, layout) else 2
        padded = vocab_rows(spec.vocab_size, layout.tp) * layout.tp
        expected = spec.num_parameters
        expected += (layout.tp - 1) * norms
        expected += (kv_replicas(spec, layout.tp) - 1) * key_value
        expected += (
            vocabularies * padded - (1 if spec.tie_word_embeddings else 2) * spec.vocab_size
        ) * spec.hidden_size
        assert held == expected

    @given(case=models_and_layouts())
    def test_layout_of_units(self, case: tuple[ModelSpec, Layout]) -> None:
        """A unit is a layer, the embedding, the norm or the head, and only the tied embedding lies on two stages."""
        spec, layout = case
        home: dict[str, int] = {}
        for stage in range(layout.num_stages):
            for parameter in stage_parameters(spec, layout, stage, 0):
                number = parameter.name.split(".")[2] if ".layers." in parameter.name else None
                assert parameter.unit == (f"layers.{number}" if number else parameter.unit)
                assert parameter.unit in ("embed", "norm", "head") or number is not None
                if parameter.unit != "embed":
                    assert home.setdefault(parameter.unit, stage) == stage

    @given(case=models_and_layouts())
    def test_decay(self, case: tuple[ModelSpec, Layout]) -> None:
        """Weight decay is for matrices: no norm and no bias is decayed, and every matrix is."""
        spec, layout = case
        for rank in range(layout.world_size):
            for parameter in of_rank(spec, layout, rank):
                assert parameter.decay == (len(parameter.shape) == 2)
                assert parameter.decay == (not parameter.name.endswith(("norm.weight", ".bias")))


class TestReplicas:
    @given(case=models_and_layouts())
    def test_partial_gradients(self, case: tuple[ModelSpec, Layout]) -> None:
        """A replica's gradient is a part of the sum under sequence parallelism (norms) or of shared key/value heads."""
        spec, layout = case
        for stage in range(layout.num_stages):
            for parameter in stage_parameters(spec, layout, stage, 0):
                for piece in parameter.pieces:
                    if "norm" in piece.name:
                        assert piece.replicas == layout.tp
                        assert piece.partial == layout.uses_sequence_parallel
                    elif ".k_proj." in piece.name or ".v_proj." in piece.name:
                        assert piece.replicas == max(1, layout.tp // spec.num_key_value_heads)
                        assert piece.partial == (piece.replicas > 1)
                    else:
                        assert (piece.replicas, piece.partial) == (1, False)

    @given(case=models_and_layouts())
    def test_queries_beside_their_keys(self, case: tuple[ModelSpec, Layout]) -> None:
        """The key/value heads of a rank are exactly those that its query heads read."""
        spec, layout = case
        group = spec.num_attention_heads // spec.num_key_value_heads
        for tp_rank in range(layout.tp):
            qkv = next(p for p in stage_parameters(spec, layout, 0, tp_rank) if p.name.endswith("qkv_proj.weight"))
            query, key, value = qkv.pieces
            heads = range(query.start // spec.head_dim, query.stop // spec.head_dim)
            kv_heads = range(key.start // spec.head_dim, key.stop // spec.head_dim)
            assert (key.start, key.stop) == (value.start, value.stop)
            assert {head // group for head in heads} == set(kv_heads)
            assert first_kv_head(spec, layout.tp, tp_rank) == kv_heads[0]


class TestWhere:
    def test_llama_70b_on_four_stages(self) -> None:
        """A rank of the first and of the last stage at tp8 pp4 holds 2.27 B of the 70.6 B parameters, others 2.14 B."""
        layout = Layout(tp=8, pp=4, layers=(20,) * 4)
        held = [
            sum(p.numel for p in of_rank(LLAMA_70B, layout, layout.rank(Coordinates(0, 0, 0, pp)))) for pp in range(4)
        ]
        assert [round(numel / 1e9, 2) for numel in held] == [2.27, 2.14, 2.14, 2.27]
        assert 8 * sum(held) == LLAMA_70B.num_parameters + 7 * 161 * 8192

    @pytest.mark.parametrize(
        ("pp", "vpp", "tied", "copied"),
        [(1, 1, True, False), (2, 1, True, True), (2, 2, True, True), (2, 1, False, False)],
    )
    def test_tied_copy(self, pp: int, vpp: int, tied: bool, copied: bool) -> None:
        """A tied head is a copy of the embedding exactly if the first and the last stage are on different ranks."""
        spec = replace(LLAMA_70B, tie_word_embeddings=tied)
        layout = Layout(pp=pp, vpp=vpp, layers=even_layers(80, pp * vpp))
        assert has_tied_copy(spec, layout) is copied
        last = [p.name for p in stage_parameters(spec, layout, layout.num_stages - 1, 0)]
        assert ("lm_head.weight" in last) == (copied or not tied)

    @given(vocab_size=st.integers(1, 10**6), tp=st.integers(1, 16))
    def test_vocabulary_rows(self, vocab_size: int, tp: int) -> None:
        """Every rank has equally many vocabulary rows, and fewer than `tp` of them all are padding."""
        assert 0 <= vocab_rows(vocab_size, tp) * tp - vocab_size < tp
