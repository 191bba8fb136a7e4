"""The loop around the step: validation, logging, checkpoints, export. Everything before it is checked already."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from triweave.checkpoint.run_lock import claimed
from triweave.collectives import all_reduce
from triweave.config.document import to_yaml
from triweave.config.validate import ResolvedRun
from triweave.data.cache import PreparedData
from triweave.data.dataset import Dataset
from triweave.data.sampler import steps_for
from triweave.errors import RunFailed
from triweave.training.batches import batch_of, training_batch, validation_batches
from triweave.training.checkpoints import RUN_FILE, RunProgress
from triweave.training.console import Console, closing, opening
from triweave.training.engine import DTYPES, Engine, build_engine
from triweave.training.export import export_hugging_face
from triweave.training.learning_rate import learning_rate
from triweave.training.metrics import (
    JsonLines,
    Meter,
    Sink,
    StepMetrics,
    TensorBoard,
    device_capacity,
    device_peak_flops,
    drop_lines,
    peak_memory,
)
from triweave.training.process import Process
from triweave.training.processes import choose_device, process_group
from triweave.training.resume import clean_up, resume, store_of
from triweave.training.saver import Saver
from triweave.training.step import evaluate_step, train_step

VALIDATION_FILE = "validation.jsonl"


def train(resolved: ResolvedRun, prepared: PreparedData, process: Process) -> int:
    """Run the whole training on this rank; returns the exit code."""
    run = resolved.run
    device = choose_device(run.runtime, process)
    if run.runtime.deterministic:
        # cuBLAS asks for a fixed workspace before it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    folder = Path(run.output_dir)
    # By the rank that writes there; the lock goes with it, whatever ends it.
    lock = claimed(folder, functools.partial(print, file=sys.stderr)) if process.rank == 0 else nullcontext()
    with lock, process_group(process, device, run.runtime.timeout_s):
        engine = build_engine(resolved, device)
        _Training(resolved, prepared, engine).run()
    return 0


class _Training:
    """One rank's run."""

    def __init__(self, resolved: ResolvedRun, prepared: PreparedData, engine: Engine) -> None:
        self.resolved, self.prepared, self.engine = resolved, prepared, engine
        self.run_file = resolved.run
        self.folder = Path(self.run_file.output_dir)
        self.data = prepared.train()
        self.held_out = prepared.validation()
        self.num_steps = number_of_steps(resolved, self.data)
        self.first = engine.groups.rank == 0
        store, checkpoint = store_of(self.run_file), self.run_file.checkpoint
        if self.first:
            clean_up(store)
        # A single save, at the end, has no step to stand beside.
        asynchronous = checkpoint.asynchronous if checkpoint.every_steps else "off"
        self.saver = Saver(store, engine, checkpoint.keep, asynchronous)
        device = engine.groups.device
        self.meter = Meter(
            engine.spec,
            engine.layout,
            self.run_file.data.seq_len,
            self.run_file.train.global_batch,
            device_peak_flops(device),
            device_capacity(device),
        )

    def run(self) -> None:
        """Train from where the run is to its end."""
        run, started, spent = self.run_file, time.monotonic(), 0.0
        resumed = resume(self.resolved, self.prepared, self.engine, self.saver.group)
        self.saver.bad |= resumed.bad.keys()
        done = 0 if resumed.progress is None else resumed.progress.step
        console = Console(self.num_steps, done, speaks=self.first)
        sinks = self.open_sinks(done)
        metrics: StepMetrics | None = None
        try:
            console.say(*opening(self.resolved, self.engine, self.meter, self.prepared.summary, self.num_steps))
            console.say(f"saves     {self.saver.method}")
            console.say(*(f"DAMAGED   {name}: {problem}; passed over" for name, problem in resumed.bad.items()))
            if done:
                console.say(f"resumed   at step {done}")
            if self.held_out is not None:
                loss = self.validate(self.held_out)
                console.say(f"held out  loss {loss:.4f} before step {done + 1}")
                self.record_validation(done, loss)
            for step in range(done, self.num_steps):
                metrics = self.step(step)
                spent += metrics.step_s
                for sink in sinks:
                    sink.write(metrics)
                last = metrics.step == self.num_steps
                if last or metrics.step % run.log.every_steps == 0:
                    left = spent / (metrics.step - done) * (self.num_steps - metrics.step)
                    console.say(self.meter.line(metrics, self.num_steps, left))
                console.advance()
                if last or (run.checkpoint.every_steps and metrics.step % run.checkpoint.every_steps == 0):
                    self.save(metrics.step)
                console.say(*(line for saved in self.saver.news() for line in saved.lines))
            if run.checkpoint.export:
                self.export()
            self.saver.finish()
            console.say(*(line for saved in self.saver.news() for line in saved.lines))
            if self.saver.unsaved is not None:
                raise RunFailed(self.saver.unsaved)
            tokens = (self.num_steps - done) * self.meter.tokens_per_step
            console.say(closing(metrics, time.monotonic() - started, tokens))
        except RunFailed:
            # All ranks raise it in the same step. What an earlier one has saved is still to be had.
            self.saver.finish()
            raise
        finally:
            console.close()
            for sink in sinks:
                sink.close()

    def step(self, step: int) -> StepMetrics:
        """One step and its measurements."""
        run = self.run_file
        begin = time.monotonic()
        rate = learning_rate(run.optimizer, step, self.num_steps)
        batch = training_batch(self.data, self.engine, seed=run.seed, step=step, global_batch=run.train.global_batch)
        loss, grad_norm = train_step(self.engine, batch, rate, run.optimizer.max_grad_norm)
        if not (loss == loss and grad_norm < float("inf")):
            raise RunFailed(f"step {step + 1}: the loss is {loss} and the gradient norm {grad_norm}; nothing was saved")
        taken = time.monotonic() - begin
        metrics = self.meter.measure(step + 1, loss, grad_norm, rate, taken, self.peak_over_ranks())
        metrics = replace(metrics, failed_saves=self.saver.failed)
        every = run.validation.every_steps
        if self.held_out is not None and (step + 1 == self.num_steps or (every and (step + 1) % every == 0)):
            metrics = replace(metrics, val_loss=self.validate(self.held_out))
            self.record_validation(step + 1, metrics.val_loss)
        return metrics

    def validate(self, held_out: Dataset) -> float:
        """Mean loss over the trained tokens of the held-out data."""
        run = self.run_file
        total, tokens = 0.0, 0
        for ids in validation_batches(
            held_out,
            global_batch=run.train.global_batch,
            max_batches=run.validation.max_batches,
        ):
            batch = batch_of(held_out, self.engine, ids)
            total += evaluate_step(self.engine, batch)
            tokens += batch.trained_tokens
        return total / max(1, tokens)

    def record_validation(self, step: int, loss: float | None) -> None:
        """Add a line to `validation.jsonl`: the only place of the loss before the first step."""
        if self.first:
            with (self.folder / VALIDATION_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "val_loss": loss}) + "\n")

    def peak_over_ranks(self) -> tuple[float, float]:
        """Largest peak of allocated and of reserved bytes over all ranks."""
        device = self.engine.groups.device
        peaks = torch.tensor(peak_memory(device, self.engine.unseen_bytes), device=device)
        allocated, reserved = all_reduce(peaks, self.engine.groups.world, torch.distributed.ReduceOp.MAX).tolist()
        return allocated, reserved

    def save(self, step: int) -> None:
        """Save a checkpoint of the state after `step` steps; it may still be on its way when this returns."""
        run = self.run_file
        progress = RunProgress(
            step, run.seed, run.train.global_batch, self.prepared.summary.fingerprint, str(self.engine.layout)
        )
        self.saver.save(progress, to_yaml(run))

    def export(self) -> None:
        """Write the Hugging Face folder."""
        run = self.run_file
        export_hugging_face(
            self.engine,
            self.folder / "hf",
            Path(run.model.path),
            DTYPES[run.model.dtype],
            tokenizer=Path(run.data.tokenizer) if run.data.tokenizer else None,
            # A model that is served with another template than it was trained with answers worse.
            chat_template=self.prepared.chat_template() if run.data.chat_template else None,
        )

    def open_sinks(self, done: int) -> list[Sink]:
        """Where metrics go; only rank 0 writes."""
        if not self.first:
            return []
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / RUN_FILE).write_text(to_yaml(self.run_file), encoding="utf-8")
        sinks: list[Sink] = [JsonLines(self.folder / "metrics.jsonl", after_step=done)]
        drop_lines(self.folder / VALIDATION_FILE, after_step=done - 1)  # after step `done` it is measured again
        if "tensorboard" in self.run_file.log.to:
            sinks.append(TensorBoard(self.folder / "tensorboard"))
        return sinks


def number_of_steps(resolved: ResolvedRun, data: Dataset) -> int:
    """Steps of the whole run, from `train.steps` or from the epochs."""
    train = resolved.run.train
    if train.steps is not None:
        return train.steps
    return steps_for(train.epochs or 1.0, data.num_sequences, train.global_batch)
