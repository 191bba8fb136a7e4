"""The decoder as the time model sees it: Llama's gated layer, and the ungated GPT layer of older measurements."""

from __future__ import annotations

from dataclasses import dataclass

from triweave.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Decoder:
    """Shapes of a decoder-only transformer."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool = True
    """SwiGLU (three matrices) or a plain MLP (two)."""
    tied: bool = False
    """Whether the output head is the embedding: one weight, or one on either of the ranks that hold an end."""

    @property
    def query(self) -> int:
        """Rows of the query projection."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Rows of the key (or value) projection."""
        return self.kv_heads * self.head_dim

    @property
    def ffn_in(self) -> int:
        """Rows of the first MLP product: gate and up, or up alone."""
        return (2 if self.gated else 1) * self.ffn

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer's matrices."""
        attention = self.hidden * (2 * self.query + 2 * self.key_value)
        return attention + self.hidden * (self.ffn_in + self.ffn)

    @property
    def head_parameters(self) -> int:
        """Weights of the output head, or of the embedding."""
        return self.hidden * self.vocab

    def flops_per_token(self, seq: int, *, causal: bool) -> float:
        """Forward-plus-backward model FLOPs of one token (`ModelSpec.flops_per_token`, for either kind of MLP)."""
        attention = (6 if causal else 12) * self.query * seq
        return float(self.layers * (6 * self.layer_parameters + attention) + 6 * self.head_parameters)


def decoder_of(spec: ModelSpec | Decoder) -> Decoder:
    """The shapes of a model."""
    if isinstance(spec, Decoder):
        return spec
    return Decoder(
        spec.num_hidden_layers,
        spec.hidden_size,
        spec.intermediate_size,
        spec.num_attention_heads,
        spec.num_key_value_heads,
        spec.head_dim,
        spec.vocab_size,
        tied=spec.tie_word_embeddings,
    )
