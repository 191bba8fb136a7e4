"""Draws docs/images/grid.svg: where the layers of Llama-3-70B lie on four nodes, and what travels between them.

    python docs/images/make_grid.py            # write the picture
    python docs/images/make_grid.py --check    # exit 1 if it is not current

Ranks, layers and bytes come from the layout, the model and the cluster, so that the picture cannot say anything else
than the trainer does. Colours are Okabe and Ito's, those of the timelines: forward sky blue, backward orange, and for
what tensor-parallel ranks exchange purple; direction and words say the same without colour.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from triweave.catalogue import find_model
from triweave.cluster import Cluster, parse_cluster
from triweave.layout import Coordinates, Layout, balanced_layers
from triweave.model_spec import ModelSpec
from triweave.parameters import holds_embedding, holds_head

TARGET = Path(__file__).with_name("grid.svg")
BYTES_PER_ACTIVATION = 2
"""bfloat16."""

_WIDTH, _MARGIN, _TEXT = 960, 12, 28
_FIRST_GPU, _PITCH, _GPU = 210, 90, 78
_TOP, _NODE, _GAP = 58, 108, 66
_STYLE = """\
text{fill:#1f2328;font:13px system-ui,sans-serif}
.name{font-weight:600}
.soft{fill:#57606a}
.mid{text-anchor:middle}
.card{fill:#fff;stroke:#d0d7de}
.node{fill:#f3f5f7;stroke:#8c959f}
.gpu{fill:#fff;stroke:#57606a}
.link{fill:#f0d7e4;stroke:#cc79a7}
.wire{fill:none;stroke:#cc79a7;stroke-width:3}
.forward{fill:#56b4e9;stroke:#222}
.backward{fill:#e69f00;stroke:#222}
@media (prefers-color-scheme:dark){
text{fill:#e6edf3}
.soft{fill:#a5b0bb}
.card{fill:#0d1117;stroke:#30363d}
.node{fill:#1a2029;stroke:#6e7681}
.gpu{fill:#0d1117;stroke:#a5b0bb}
.link{fill:#5c3a4d}
.forward,.backward{stroke:#e6edf3}
}"""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one GPU sends for one micro-batch, in bytes."""

    layer_bytes: float
    """To its tensor-parallel neighbours, a layer, forward and backward."""
    border_bytes: int
    """To the same place of the next stage; as much comes back."""


def traffic(spec: ModelSpec, layout: Layout, seq_len: int) -> Traffic:
    """Bytes that a GPU sends under sequence parallelism.

    A layer gathers and scatters the whole activation twice each in forward; backward does the same and gathers the
    inputs of two products again: ten collectives, of which a rank sends (tp - 1)/tp (Korthikanti et al. 2205.05198).
    """
    whole = seq_len * layout.micro_batch * spec.hidden_size * BYTES_PER_ACTIVATION
    return Traffic(10 * whole * (layout.tp - 1) / layout.tp, whole // layout.tp)


def draw_grid(name: str, spec: ModelSpec, layout: Layout, cluster: Cluster, seq_len: int) -> str:
    """The picture as one `<svg role="img">`, for a layout whose stages are one node each.

    Args:
        name: of the model, as the title shows it.
        spec: the model.
        layout: the grid, with its layer map; tp fills a node.
        cluster: the machines.
        seq_len: tokens of a sequence.
    """
    sent = traffic(spec, layout, seq_len)
    height = _TOP + layout.pp * (_NODE + _GAP) - _GAP + 58
    title = f"{name} on {cluster.num_nodes} nodes of {cluster.gpus_per_node} {cluster.gpu.name.upper()}: {layout}"
    described = "; ".join(f"node {stage}: {', '.join(_contents(layout, stage))}" for stage in range(layout.pp))
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-labelledby="grid-title grid-desc" '
        f'viewBox="0 0 {_WIDTH} {height}">',
        f'<title id="grid-title">{title}</title>',
        f'<desc id="grid-desc">Each node is one pipeline stage, and its {layout.tp} GPUs share every layer of it. '
        f"{described}. Inside a node activations travel over NVLink, {_mib(sent.layer_bytes)} a GPU, layer and "
        f"micro-batch; between nodes each GPU hands activations to the same place of the next node and gets gradients "
        f"back, {_mib(sent.border_bytes)} a micro-batch each way.</desc>",
        f"<style>{_STYLE}</style>",
        f'<rect class="card" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="10"/>',
        f'<text class="name" x="{_TEXT}" y="34">{title}</text>',
        f'<text class="soft" x="{_WIDTH - _TEXT}" y="34" text-anchor="end">sequence {seq_len:,}, '
        f"micro-batch {layout.micro_batch}</text>",
    ]
    for stage in range(layout.pp):
        top = _TOP + stage * (_NODE + _GAP)
        lines += _node(layout, cluster, stage, top, sent)
        if stage + 1 < layout.pp:
            lines += _border(layout, cluster, top + _NODE, sent)
    return "\n".join([*lines, *_legend(height - 30), "</svg>", ""])


def _node(layout: Layout, cluster: Cluster, stage: int, top: int, sent: Traffic) -> Iterator[str]:
    """A node: what its stage holds, its GPUs, and the links between them."""
    ranks = [layout.rank(Coordinates(tp, 0, 0, stage)) for tp in range(layout.tp)]
    yield f'<rect class="node" x="{_MARGIN}" y="{top}" width="{_WIDTH - 2 * _MARGIN}" height="{_NODE}" rx="6"/>'
    node = ranks[0] // cluster.gpus_per_node
    yield f'<text class="name" x="{_TEXT}" y="{top + 26}">node {node} = stage {stage}</text>'
    for number, content in enumerate(_contents(layout, stage)):
        yield f'<text x="{_TEXT}" y="{top + 48 + 18 * number}">{content}</text>'
    left, right = _FIRST_GPU, _FIRST_GPU + (layout.tp - 1) * _PITCH + _GPU
    wires = "".join(f"M{_centre(tp)} {top + 54}v16" for tp in range(layout.tp))
    yield f'<path class="wire" d="{wires}"/>'
    yield f'<rect class="link" x="{left}" y="{top + 70}" width="{right - left}" height="26" rx="4"/>'
    link = f"NVLink, {cluster.gpu.nvlink_bandwidth / 1e9:.0f} GB/s each way"
    yield (
        f'<text class="mid" x="{(left + right) / 2:g}" y="{top + 88}">{link}: all-gather and reduce-scatter, '
        f"{_mib(sent.layer_bytes)} a GPU, layer and micro-batch</text>"
    )
    for tp, rank in enumerate(ranks):
        yield f'<rect class="gpu" x="{_FIRST_GPU + tp * _PITCH}" y="{top + 12}" width="{_GPU}" height="42" rx="4"/>'
        yield f'<text class="mid name" x="{_centre(tp)}" y="{top + 30}">rank {rank}</text>'
        yield f'<text class="mid soft" x="{_centre(tp)}" y="{top + 47}">tp {tp}</text>'


def _border(layout: Layout, cluster: Cluster, top: int, sent: Traffic) -> Iterator[str]:
    """What crosses the network between two stages: an arrow each way for every GPU."""
    texts = (
        f"network, {cluster.gpu.nic_bandwidth / 1e9:.0f} GB/s each way,",
        f"{_mib(sent.border_bytes)} a GPU and",
        "micro-batch, each way",
    )
    for number, text in enumerate(texts):
        yield f'<text x="{_TEXT}" y="{top + 19 + 17 * number}">{text}</text>'
    centres = [_centre(tp) for tp in range(layout.tp)]
    yield f'<path class="forward" d="{"".join(_arrow(x - 14, top + 8, top + _GAP - 8) for x in centres)}"/>'
    yield f'<path class="backward" d="{"".join(_arrow(x + 14, top + _GAP - 8, top + 8) for x in centres)}"/>'


def _legend(y: int) -> Iterator[str]:
    yield f'<path class="forward" d="{_arrow(_TEXT + 8, y - 14, y + 14)}"/>'
    yield f'<text x="{_TEXT + 26}" y="{y + 5}">activations, forward</text>'
    yield f'<path class="backward" d="{_arrow(_TEXT + 188, y + 14, y - 14)}"/>'
    yield f'<text x="{_TEXT + 206}" y="{y + 5}">gradients, backward</text>'
    yield f'<rect class="link" x="{_TEXT + 356}" y="{y - 9}" width="30" height="18" rx="4"/>'
    yield f'<text x="{_TEXT + 396}" y="{y + 5}">tensor parallel: every GPU of a node has a slice of every layer</text>'


def _contents(layout: Layout, stage: int) -> list[str]:
    layers = layout.layers_of(stage)
    parts = ["embedding"] if holds_embedding(layout, stage) else []
    parts.append(f"layers {layers[0]} to {layers[-1]}")
    return [*parts, "norm, head and loss"] if holds_head(layout, stage) else parts


def _arrow(x: int, tail: int, head: int) -> str:
    """A block arrow from y = `tail` to y = `head`."""
    neck = head - 12 if head > tail else head + 12
    return f"M{x - 4} {tail}h8V{neck}h5L{x} {head}L{x - 9} {neck}h5z"


def _centre(tp: int) -> int:
    return _FIRST_GPU + tp * _PITCH + _GPU // 2


def _mib(count: float) -> str:
    return f"{count / 2**20:g} MiB"


def main(check: bool) -> int:
    """Write the picture, or compare it; returns the exit code."""
    spec, seq_len = find_model("llama-3-70b"), 4096
    layout = Layout(tp=8, pp=4, layers=balanced_layers(spec, 4, seq_len))
    picture = draw_grid("Llama-3-70B", spec, layout, parse_cluster("4x8xh100-80gb"), seq_len)
    if check:
        return 0 if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == picture else 1
    TARGET.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] == ["--check"]))
