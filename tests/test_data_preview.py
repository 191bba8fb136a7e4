"""What a run will train on, shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_tokenizer import save_tokenizer, vocab_size, write_jsonl

from triweave.config.schema import DataConfig, ModelConfig, Run, TrainConfig
from triweave.data.preview import Preview, length_histogram, preview, render
from triweave.errors import InputError
from triweave.model_spec import ModelSpec

SPEC = ModelSpec(vocab_size(), 8, 16, 1, 2, 2, 4)
TALK = [
    {"role": "user", "content": "What is the capital of Japan?"},
    {"role": "assistant", "content": "Tokyo.\x1b[2J"},
    {"role": "user", "content": "Thank you! 東京"},
    {"role": "assistant", "content": "No, thank you."},
]


def make_run(tmp_path: Path, records: list[dict[str, Any]], **data: Any) -> Run:
    save_tokenizer(tmp_path / "model")
    path = write_jsonl(tmp_path / "train.jsonl", records)
    config = DataConfig(**{"train": (str(path),), "seq_len": 128, "validation": 0.0, **data})
    return Run(
        ModelConfig(str(tmp_path / "model")),
        config,
        train=TrainConfig(global_batch=2),
        output_dir=str(tmp_path / "run"),
    )


def records() -> list[dict[str, Any]]:
    fillers = [
        [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes " * n}] for n in range(1, 25)
    ]
    return [{"messages": TALK}, *({"messages": filler} for filler in fillers)]


def printed(shown: Preview, **console: Any) -> str:
    out = io.StringIO()
    render(shown, Console(file=out, width=100, **console))
    return out.getvalue()


def test_example_is_cut_where_training_begins_and_ends(tmp_path: Path) -> None:
    """The segments are the text of the first record of the file, token by token, replies and their ends trained."""
    shown = preview(make_run(tmp_path, records()), SPEC)
    trained = [segment.text for segment in shown.segments if segment.trained]
    assert trained == ["Tokyo.\x1b[2J<|im_end|>", "No, thank you.<|im_end|>"]
    text = "".join(segment.text for segment in shown.segments)
    assert text.startswith(
        "<s><|im_start|>user\nWhat is the capital of Japan?<|im_end|>\n<|im_start|>assistant\nTokyo."
    )
    assert preview(make_run(tmp_path, records()), SPEC, example=3).segments[1].text == "yes yes yes <|im_end|>"


def test_page_is_readable_without_colour(tmp_path: Path) -> None:
    """Numbers, histogram, warnings; what is trained stands in brackets, and data cannot steer the terminal."""
    page = printed(preview(make_run(tmp_path, records()), SPEC))
    assert "messages: the first record" in page
    assert "⟦Tokyo.␛[2J<|im_end|>⟧" in page
    assert "\x1b" not in page
    assert "steps an epoch" in page
    assert "seq_len" in page


def test_colour_comes_on_top(tmp_path: Path) -> None:
    """On a terminal the trained parts are bold and underlined, the others dim."""
    page = printed(preview(make_run(tmp_path, records()), SPEC), force_terminal=True, color_system="standard")
    assert "\x1b[1;4m⟦Tokyo." in page
    assert "\x1b[2m" in page


def test_long_example_is_cut_on_the_page(tmp_path: Path) -> None:
    """A screen is a screen: the rest is counted."""
    run = make_run(tmp_path, [{"text": "The fox. " * 1000}], seq_len=20_000)
    assert "characters more" in printed(preview(run, SPEC))


def test_numbers_agree_with_the_run(tmp_path: Path) -> None:
    """Steps an epoch are sequences over the global batch, rounded up."""
    shown = preview(make_run(tmp_path, records()), SPEC)
    assert shown.steps_an_epoch == -(-shown.summary.train.sequences // 2)
    assert shown.summary.source.examples == 25
    value = json.loads(json.dumps(shown.to_dict()))
    assert value["summary"]["train"]["trained_tokens"] == shown.summary.train.trained_tokens
    assert value["segments"][1]["trained"] is True


def test_histogram_counts_every_example_and_marks_seq_len(tmp_path: Path) -> None:
    """The classes hold all examples; the line of seq_len stands after the class that it ends in."""
    shown = preview(make_run(tmp_path, records(), seq_len=40, too_long="truncate"), SPEC)
    source = shown.summary.source
    assert sum(source.histogram) == 25
    lines = length_histogram(source, 40)
    mark = next(i for i, line in enumerate(lines) if line.endswith("seq_len"))
    assert lines[mark].startswith("       40 ┄")
    below = sum(int(line.rpartition(" ")[2]) for line in lines[:mark] if "█" in line or "▏" in line)
    assert 0 < below < 25
    assert max(line.count("█") for line in lines) == 40
    assert length_histogram(source, 10**6)[-1].endswith("seq_len")
    assert any("cut off at seq_len = 40" in warning for warning in shown.warnings)


def test_example_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """The range is said."""
    run = make_run(tmp_path, records())
    with pytest.raises(InputError, match=r"example = 25: must be from 0 to 24: .* nearest: 24"):
        preview(run, SPEC, example=25)


def test_tokens_are_shown_as_numbers(tmp_path: Path) -> None:
    """Without a tokenizer there are no words."""
    run = make_run(tmp_path, [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}], format="tokens")
    run = replace(run, model=ModelConfig(str(tmp_path / "nowhere")))
    assert [(s.text, s.trained) for s in preview(run, SPEC).segments] == [("5 6 ", False), ("7 ", True)]


def test_preview_needs_no_torch() -> None:
    """It runs where only tokenizers, numpy and jinja2 are installed."""
    code = (
        "import sys, triweave.data.preview; raise SystemExit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
