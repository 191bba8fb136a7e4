"""Measures what a reference has to be corrected for: torch's log-softmax, and the gradient of the padding token.

    python docs/decisions/yardstick.py MODEL_DIR TRAIN.jsonl

Prints the figures of record 5. The text is the beginning of the training data, 385 tokens of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from triweave.verify.reference import load_transformers

Gradients = Mapping[str, Tensor]


def gradients(model: nn.Module, ids: Tensor, widen: Callable[[Tensor], Tensor]) -> Gradients:
    """Gradients of the mean token loss, whose logits pass through `widen` first."""
    model.zero_grad()
    logits = widen(model(ids[:, :-1]).logits)
    cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(one: Tensor, other: Tensor) -> float:
    """Frobenius norm of the difference over that of the other."""
    return float((one - other).norm() / other.norm())


def main(folder: Path, data: Path) -> None:
    """Print the three lines."""
    model = load_transformers(folder, torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    records = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    text = " ".join(message["content"] for record in records for message in record["messages"])
    ids = torch.tensor([tokenizer.encode(text).ids[:385]])

    logits = model(ids).logits.detach()
    exact = logits.double().log_softmax(-1)
    off, rounding = ((values.double() - exact).abs().max() for values in (logits.log_softmax(-1), exact.float()))
    print(f"log-softmax in float32: off by {off:.1e}, rounding alone {rounding:.1e}")

    short, wide = gradients(model, ids, lambda x: x), gradients(model, ids, lambda x: x.double())
    print(f"gradients with the loss in float32: off by {max(relative(short[n], wide[n]) for n in wide):.1e}")

    name, padding = (
        "model.embed_tokens",
        json.loads((folder / "config.json").read_text(encoding="utf-8"))["pad_token_id"],
    )
    turns = "".join(f"<|im_start|>{role}\nHi<|im_end|>\n" for role in ("user", "assistant"))
    ids, embedding = torch.tensor([tokenizer.encode(turns).ids]), model.get_submodule(name)
    whole = gradients(model, ids, lambda x: x.double())[f"{name}.weight"]
    embedding.padding_idx = padding
    without = gradients(model, ids, lambda x: x.double())[f"{name}.weight"]
    row = relative(without[padding], whole[padding])
    print(f"padding token's row: off by {row:.1e}, the embedding's gradient by {relative(without, whole):.1e}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
