"""Llama: RMSNorm, rotary grouped-query attention, SwiGLU (Touvron et al. 2302.13971, 2307.09288), one stage of it.

Module names are Hugging Face's. The tensor-parallel split lives inside the layers; the pipeline split is which
layers a `Stage` is given. Activations are `[seq/tp, batch, hidden]` under sequence parallelism, `[seq, batch,
hidden]` without. Under context parallelism seq is this rank's share of the sequence, in every shape: only attention
looks beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from triweave.graphs.replay import LayerReplay, StageGraphs
from triweave.groups import Group
from triweave.layers.attention import Attention, AttentionKernel
from triweave.layers.documents import Packed
from triweave.layers.embedding import VocabParallelEmbedding
from triweave.layers.linear import ColumnParallelLinear
from triweave.layers.norm import ResidualRMSNorm, RMSNorm
from triweave.layers.rotary import Rotation, make_rotation
from triweave.layers.swiglu import SwiGLU
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout, Recompute
from triweave.model_spec import ModelSpec
from triweave.offload import Offloader
from triweave.parameters import holds_embedding, holds_head, vocab_rows
from triweave.recompute import checkpointed, checkpointed_after, recomputing


@dataclass(frozen=True, slots=True)
class StageInput:
    """What every stage needs of a micro-batch beside the activations."""

    tokens: Tensor
    """`[seq, batch]` token ids; only the first stage reads them."""
    positions: Tensor
    """`[seq, batch]`; they start again at 0 in every document."""
    documents: Packed | None = None
    """What was packed together; None when every sequence is one document."""

    def to(self, device: torch.device) -> StageInput:
        """The same on `device`. Pinned memory is not needed: a micro-batch is some 100 kB."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            documents=None if self.documents is None else self.documents.to(device),
        )


class DecoderLayer(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        spec: ModelSpec,
        tp: TensorParallel,
        kernel: AttentionKernel,
        recompute: tuple[Recompute, ...],
        *,
        cp: Group | None = None,
        fp8: bool = False,
        offloader: Offloader | None = None,
    ) -> None:
        super().__init__()
        self.recompute = frozenset(recompute)
        self.offloader = offloader or Offloader()
        self.input_layernorm = ResidualRMSNorm(spec.hidden_size, spec.rms_norm_eps, tp)
        self.self_attn = Attention(spec, tp, kernel, cp=cp, fp8=fp8)
        self.post_attention_layernorm = ResidualRMSNorm(spec.hidden_size, spec.rms_norm_eps, tp)
        self.mlp = SwiGLU(spec.hidden_size, spec.intermediate_size, tp, recompute="swiglu" in self.recompute, fp8=fp8)

    def forward(
        self, x: Tensor, rotation: Rotation, documents: Packed | None, replay: LayerReplay | None = None
    ) -> Tensor:
        """`[seq/tp, batch, hidden]` to the same shape, by `replay` where it is given."""
        return self.compute(x, rotation, documents) if replay is None else replay(x)

    def compute(self, x: Tensor, rotation: Rotation, documents: Packed | None) -> Tensor:
        """The same, kernel by kernel."""
        block = partial(self._block, rotation=rotation, documents=documents)
        return self.offloader.layer(partial(self._whole, block), x)

    def _whole(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        with self.offloader.of("layer"):
            return checkpointed(block, x, enabled="layer" in self.recompute)

    def _block(self, x: Tensor, rotation: Rotation, documents: Packed | None) -> Tensor:
        x, normed = self.input_layernorm(x)
        attention = partial(self._attention, x, rotation=rotation, documents=documents)
        # This sum is the next norm's: x + attention, and the norm of that.
        x, normed = self.post_attention_layernorm(
            x, self._half("attention", self.input_layernorm, x, normed, attention)
        )
        return x + self._half("mlp", self.post_attention_layernorm, x, normed, partial(self._mlp, x))

    def _half(
        self, name: Recompute, norm: RMSNorm, x: Tensor, normed: Tensor, block: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """`block(normed)`, run again in backward from the stream `x` where that is asked for."""
        return checkpointed_after(norm.again, x, normed, block, enabled=name in self.recompute)

    def _attention(self, x: Tensor, normed: Tensor, rotation: Rotation, documents: Packed | None) -> Tensor:
        with self.offloader.of("attention"):
            qkv = self._project(self.input_layernorm, self.self_attn.qkv_proj, x, normed)
            attended: Tensor = self.self_attn(qkv, rotation, documents)
            return attended

    def _mlp(self, x: Tensor, normed: Tensor) -> Tensor:
        with self.offloader.of("mlp"):
            gate_up = self._project(self.post_attention_layernorm, self.mlp.gate_up_proj, x, normed)
            output: Tensor = self.mlp(gate_up)
            return output

    def _project(self, norm: RMSNorm, projection: ColumnParallelLinear, x: Tensor, normed: Tensor) -> Tensor:
        """`projection(normed)`; the norm's output is kept for backward, or computed again there from `x`."""
        with recomputing(norm.again, x, enabled="norm" in self.recompute):
            projected: Tensor = projection(normed)
            return projected


class Decoder(nn.Module):
    """The part of Hugging Face's `model.` that a stage holds."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        stage: int,
        tp: TensorParallel,
        kernel: AttentionKernel,
        *,
        cp: Group | None,
        fp8: bool,
        offloader: Offloader,
    ) -> None:
        super().__init__()
        self.embed_tokens = (
            VocabParallelEmbedding(vocab_rows(spec.vocab_size, tp.size), spec.hidden_size, tp)
            if holds_embedding(layout, stage)
            else None
        )
        # Keyed by the layer's number in the whole model, so that names are the same on every layout.
        self.layers = nn.ModuleDict(
            {
                str(layer): DecoderLayer(spec, tp, kernel, layout.recompute, cp=cp, fp8=fp8, offloader=offloader)
                for layer in layout.layers_of(stage)
            }
        )
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, tp) if holds_head(layout, stage) else None


class Stage(nn.Module):
    """One virtual stage of the pipeline: some layers, the embedding if it is the first, the head if it is the last."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        stage: int,
        tp: TensorParallel,
        kernel: AttentionKernel,
        frequencies: Tensor,
        *,
        cp: Group | None = None,
        fp8: bool = False,
        offloader: Offloader | None = None,
    ) -> None:
        """Build the modules of stage `stage`.

        Args:
            spec: the model.
            layout: the grid.
            stage: number of the virtual stage.
            tp: the tensor-parallel ranks.
            kernel: what may compute attention.
            frequencies: `rotary.inverse_frequencies` on the device that computes.
            cp: the context-parallel ranks; None where there are none.
            fp8: whether the layers' products are in fp8.
            offloader: what all stages of a rank move to host memory by; None moves nothing.
        """
        super().__init__()
        self.frequencies = frequencies
        self.offloader = offloader or Offloader()
        self.model = Decoder(spec, layout, stage, tp, kernel, cp=cp, fp8=fp8, offloader=self.offloader)
        layers = [layer for layer in self.model.layers.values() if isinstance(layer, DecoderLayer)]
        self.graphs = StageGraphs(layers, frequencies)
        self.lm_head: ColumnParallelLinear | None = None
        if holds_head(layout, stage):
            self.lm_head = ColumnParallelLinear(spec.hidden_size, vocab_rows(spec.vocab_size, tp.size), tp)
            if spec.tie_word_embeddings and self.model.embed_tokens is not None:
                self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, x: Tensor | None, batch: StageInput) -> Tensor:
        """Activations to activations, or to logits on the last stage.

        Args:
            x: `[seq/tp, batch, hidden]`; None for the first stage, which looks the tokens up.
            batch: what else the stage needs of the micro-batch.

        Returns:
            `[seq/tp, batch, hidden]`, or `[seq, batch, vocab/tp]` from the last stage.
        """
        if self.model.embed_tokens is not None:
            x = self.model.embed_tokens(batch.tokens)
        if x is None:
            raise ValueError("only the first stage starts from tokens")
        rotation = make_rotation(self.frequencies, batch.positions, x.dtype)
        self.offloader.begin_stage()
        slot = self.graphs.slot_for(x, rotation, batch.documents)
        if slot is not None:
            x = slot.take(x, rotation, batch.documents)
        for number, layer in enumerate(self.model.layers.values()):
            x = layer(x, rotation, batch.documents, None if slot is None else slot.layers[number])
        if self.lm_head is not None and self.model.norm is not None:
            x = self.lm_head(self.model.norm(x))
        return x
