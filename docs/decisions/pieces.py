"""Prints which rows of which Hugging Face tensors one fused product holds: the example of record 1."""

from __future__ import annotations

from triweave.catalogue import find_model
from triweave.layout import Layout
from triweave.parameters import stage_parameters

spec, layout, rank = find_model("llama-3-70b"), Layout(tp=8, layers=(80,)), 1
parameter = next(p for p in stage_parameters(spec, layout, 0, rank) if "qkv_proj" in p.name)
print(f"qkv_proj.weight on tensor-parallel rank {rank} of {layout.tp}, Llama-3-70B: {list(parameter.shape)}")
for piece in parameter.pieces:
    rows = f"rows {piece.offset}-{piece.offset + piece.local_shape[0] - 1}"
    print(f"  {rows} are rows {piece.start}-{piece.stop - 1} of {piece.name.split('self_attn.')[1]}")
