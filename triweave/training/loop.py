"""The loop around the step: validation, logging, checkpoints, export. Everything before it is checked already."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import ReduceOp

from triweave.checkpoint.kept import found, name_of, step_of
from triweave.collectives import all_reduce
from triweave.config.document import to_yaml
from triweave.config.schema import Run
from triweave.config.validate import ResolvedRun
from triweave.data.cache import PreparedData
from triweave.data.dataset import Dataset
from triweave.data.sampler import steps_for
from triweave.errors import RunFailed
from triweave.recovery.goodput import Timeline
from triweave.recovery.save_now import SaveNow
from triweave.recovery.stop import STOPPED, signal_name
from triweave.run_folder import SAVE_NOW_FILE
from triweave.training.batches import batch_of, training_batch, validation_batches
from triweave.training.checkpoints import RUN_FILE
from triweave.training.console import Console, closing, opening
from triweave.training.endings import leave_word, note_code
from triweave.training.engine import DTYPES, Engine, build_engine
from triweave.training.export import export_hugging_face
from triweave.training.foretold import Foretold
from triweave.training.grid_map import grid_map
from triweave.training.host_need import offload_bytes, warnings
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
from triweave.training.not_finite import NumberGuard
from triweave.training.process import Process
from triweave.training.rank import Rank, at_work
from triweave.training.replicas import compare_replicas, has_replicas
from triweave.training.resume import Resumed, clean_up, resume
from triweave.training.resume_check import store_of
from triweave.training.run_progress import RunProgress
from triweave.training.saver import Saver
from triweave.training.step import evaluate_step, train_step

VALIDATION_FILE = "validation.jsonl"


def train(resolved: ResolvedRun, prepared: PreparedData, process: Process) -> int:
    """Run the whole training on this rank; returns the exit code."""
    with at_work(resolved, prepared, process) as rank:
        if rank.asked:
            code = _stop_at_start(resolved.run, rank)
        else:
            with rank.together("making the process groups of the layout"):
                engine = build_engine(resolved, rank.device)
            code = _Training(resolved, prepared, engine, rank).run()
        note_code(Path(resolved.run.output_dir), process, code)
        if code == STOPPED:
            rank.leave_stopped()
        return code


def _stop_at_start(run: Run, rank: Rank) -> int:
    """End before anything is built or loaded, because a rank was asked to stop; returns the exit code."""
    if rank.process.rank == 0:
        folder = Path(run.output_dir)
        # All that was saved is on the disk already.
        names = found(store_of(run))
        step = (step_of(names[0]) or 0) if names else 0
        timeline = Timeline(folder)
        timeline.add("start", 0, at=rank.process.started_at)
        timeline.add("end", step)
        leave_word(folder, step, rank.asked)
        print(f"stopped   at step {step} by {signal_name(rank.asked)}; the same command goes on from there", flush=True)
    return STOPPED


class _Training:
    """One rank's run."""

    def __init__(self, resolved: ResolvedRun, prepared: PreparedData, engine: Engine, rank: Rank) -> None:
        self.resolved, self.prepared, self.engine, self.rank = resolved, prepared, engine, rank
        self.watch = rank.watch
        engine.pipeline.before_action = self.watch.mark
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
        beside = offload_bytes(resolved, engine.groups.at.pp)
        self.saver = Saver(store, engine, checkpoint.keep, asynchronous, rank.owner, beside)
        device = engine.groups.device
        self.meter = Meter(
            engine.spec,
            engine.layout,
            self.run_file.data.seq_len,
            self.run_file.train.global_batch,
            device_peak_flops(device),
            device_capacity(device),
        )
        self.guard = NumberGuard(engine, self.run_file, self.data, self.folder)
        self.timeline = Timeline(None)
        self.asked = 0
        """Number of the signal by which any rank was asked to stop; the same on all ranks, for they agree on it."""
        self.save_now = SaveNow(self.folder if self.first else None)

    def run(self) -> int:
        """Train from where the run is to its end; returns the exit code."""
        run, started, spent = self.run_file, time.monotonic(), 0.0
        resumed = self.resume()
        done = 0 if resumed.progress is None else resumed.progress.step
        console = Console(self.num_steps, done, speaks=self.first)
        sinks = self.open_sinks(done)
        metrics: StepMetrics | None = None
        try:
            foretold = Foretold(self.resolved, self.engine, self.folder, speaks=self.first)
            console.say(*opening(self.resolved, self.engine, self.meter, self.prepared.summary, self.num_steps))
            console.say(*(grid_map(self.engine.layout, self.rank.places) if self.first else ()))
            console.say(*foretold.opening(), *warnings(self.saver.hosts), f"saves     {self.saver.method}")
            console.say(f"checked   {self.rank.check_groups(self.engine.groups)}")
            console.say(*(f"DAMAGED   {name}: {problem}; passed over" for name, problem in resumed.bad.items()))
            if done:
                console.say(f"resumed   at step {done}")
            console.say(*([f"moments   {resumed.moments}"] if resumed.moments else ()))
            self.over_ranks()
            if self.asked:
                return self.stopped(done, console)
            if self.held_out is not None:
                loss = self.validate(self.held_out, done)
                console.say(f"held out  loss {loss:.4f} before step {done + 1}")
                self.record_validation(done, loss)
            for step in range(done, self.num_steps):
                foretold.before(step - done + 1)
                metrics, warning = self.step(step)
                console.say(*foretold.after(step - done + 1))
                if step == done:
                    self.rank.check_collectives()
                spent += metrics.step_s
                for sink in sinks:
                    sink.write(metrics)
                last = metrics.step == self.num_steps
                if last or metrics.step % run.log.every_steps == 0:
                    left = spent / (metrics.step - done) * (self.num_steps - metrics.step)
                    console.say(self.meter.line(metrics, self.num_steps, left))
                if warning:
                    console.say(f"warning   {warning}")
                console.advance()
                due = run.checkpoint.every_steps and metrics.step % run.checkpoint.every_steps == 0
                if self.save_now.asked:
                    self.save_now.begun(name_of(metrics.step))
                    console.say(f"asked     by {self.folder / SAVE_NOW_FILE}: saving {name_of(metrics.step)}")
                saves = bool(last or due or self.asked or self.save_now.asked)
                self.compare_replicas(metrics.step, saves=saves)
                if saves:
                    self.save(metrics.step)
                self.tell_saves(console)
                if self.asked and not last:
                    return self.stopped(metrics.step, console)
            # What can be made again from a checkpoint comes after it: a folder that cannot be written costs no step.
            self.finish_saving(console)
            if run.checkpoint.export:
                self.export()
            self.check_saved()
            tokens = (self.num_steps - done) * self.meter.tokens_per_step
            self.timeline.add("end", self.num_steps)
            console.say(closing(metrics, time.monotonic() - started, tokens), *self.where_time_went())
            return 0
        except RunFailed:
            # All ranks raise it in the same step. What an earlier one has saved is still to be had.
            self.saver.finish()
            raise
        finally:
            console.close()
            for sink in sinks:
                sink.close()

    def step(self, step: int) -> tuple[StepMetrics, str]:
        """One step: its measurements, and a warning if there is something to say of its numbers."""
        run = self.run_file
        begin = time.monotonic()
        rate = learning_rate(run.optimizer, step, self.num_steps)
        self.watch.enter("reading data", step + 1)
        try:
            batch = training_batch(
                self.data, self.engine, seed=run.seed, step=step, global_batch=run.train.global_batch
            )
        except (OSError, ValueError, IndexError) as error:
            raise RunFailed(f"step {step + 1}: the data in {self.prepared.folder} cannot be read ({error})") from None
        self.watch.enter("computing", step + 1)
        loss, grad_norm = train_step(self.engine, batch, rate, run.optimizer.max_grad_norm)
        taken = time.monotonic() - begin
        warning = self.guard.look(step, batch, loss, grad_norm)
        metrics = self.meter.measure(step + 1, loss, grad_norm, rate, taken, self.over_ranks())
        metrics = replace(metrics, failed_saves=self.saver.failed)
        self.timeline.add("step", step + 1, taken)
        every = run.validation.every_steps
        if self.held_out is not None and (step + 1 == self.num_steps or (every and (step + 1) % every == 0)):
            metrics = replace(metrics, val_loss=self.validate(self.held_out, step + 1))
            self.record_validation(step + 1, metrics.val_loss)
        return replace(metrics, goodput=self.timeline.ledger.goodput), warning

    def compare_replicas(self, step: int, *, saves: bool) -> None:
        """Hold replicas against each other when it is time, and before what they hold is saved.

        Raises:
            RunFailed: they differ. All ranks raise the same.
        """
        every = self.run_file.train.compare_replicas_every
        if not every or not (saves or step % every == 0) or not has_replicas(self.engine.layout):
            return
        self.watch.enter("comparing replicas", step)
        if said := compare_replicas(self.engine):
            raise RunFailed(
                f"step {step}: {said}. A GPU, its memory or a link is at fault; nothing of this step is saved:"
                " leave the host out, and the same command goes on from the last checkpoint"
            )

    def validate(self, held_out: Dataset, step: int) -> float:
        """Mean loss over the trained tokens of the held-out data, after `step` steps."""
        run, begin = self.run_file, time.monotonic()
        self.watch.enter("validating", step)
        total, tokens = 0.0, 0
        for ids in validation_batches(
            held_out,
            global_batch=run.train.global_batch,
            max_batches=run.validation.max_batches,
        ):
            batch = batch_of(held_out, self.engine, ids)
            total += evaluate_step(self.engine, batch)
            tokens += batch.trained_tokens
        self.timeline.add("validation", step, time.monotonic() - begin)
        return total / max(1, tokens)

    def record_validation(self, step: int, loss: float | None) -> None:
        """Add a line to `validation.jsonl`: the only place of the loss before the first step."""
        if self.first:
            with (self.folder / VALIDATION_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "val_loss": loss}) + "\n")

    def over_ranks(self) -> tuple[float, float]:
        """Largest peak of allocated and of reserved bytes over all ranks; and whether any was asked to stop or to save.

        One reduction for all: the ranks agree on the step at which they do it, and it costs them nothing.
        """
        device = self.engine.groups.device
        wishes = (float(self.rank.stop.number), float(self.save_now.look()))
        peak = peak_memory(device, self.engine.unseen_bytes, self.engine.graph_bytes)
        mine = torch.tensor((*peak, *wishes), device=device)
        allocated, reserved, asked, save_now = all_reduce(mine, self.engine.groups.world, ReduceOp.MAX).tolist()
        self.asked, self.save_now.asked = int(asked), bool(save_now)
        return allocated, reserved

    def resume(self) -> Resumed:
        """Load the checkpoint that the run file asks for."""
        if self.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.timeline = Timeline(self.folder)
        self.timeline.add("start", 0, at=self.rank.process.started_at)
        begin = time.monotonic()
        self.watch.enter("loading", 0, in_step=False)
        resumed = resume(self.resolved, self.prepared, self.engine, self.saver.group, self.rank.owner)
        self.saver.bad |= resumed.bad.keys()
        if resumed.progress is not None:
            self.timeline.add("restore", resumed.progress.step, time.monotonic() - begin)
        return resumed

    def save(self, step: int) -> None:
        """Save a checkpoint of the state after `step` steps; it may still be on its way when this returns."""
        run, begin = self.run_file, time.monotonic()
        self.watch.enter("saving", step, in_step=False)
        progress = RunProgress(
            step, run.seed, run.train.global_batch, self.prepared.summary.fingerprint, str(self.engine.layout)
        )
        self.saver.save(progress, to_yaml(run))
        self.timeline.add("save", step, time.monotonic() - begin)

    def stopped(self, step: int, console: Console) -> int:
        """End here because the run was asked to, when all is on the disk; returns the exit code."""
        self.finish_saving(console)
        self.check_saved()
        self.timeline.add("end", step)
        console.say(f"stopped   at step {step} by {signal_name(self.asked)}; the same command goes on from there")
        console.say(*self.where_time_went())
        if self.first:
            leave_word(self.folder, step, self.asked)
        return STOPPED

    def tell_saves(self, console: Console) -> None:
        """Say how the saves went that have ended by now; who asked for one sees it by the file that is gone."""
        for saved in self.saver.news():
            console.say(*saved.lines)
            self.save_now.ended(saved.name)

    def finish_saving(self, console: Console) -> None:
        """Wait for the save that is under way, if one is."""
        self.watch.enter("saving", self.watch.step, in_step=False)
        self.saver.finish()
        self.tell_saves(console)

    def check_saved(self) -> None:
        """See that the last save went well.

        Raises:
            RunFailed: it did not; why.
        """
        if self.saver.unsaved is not None:
            raise RunFailed(self.saver.unsaved)

    def where_time_went(self) -> list[str]:
        """The last lines of the log: goodput over all starts, and how often to save."""
        ledger = self.timeline.ledger
        advice = ledger.recommend(self.run_file.checkpoint.hours_between_failures)
        return [f"goodput   {ledger.summary()}", *([f"          {advice}"] if advice else [])]

    def export(self) -> None:
        """Write the Hugging Face folder."""
        run, begin = self.run_file, time.monotonic()
        self.watch.enter("exporting", self.num_steps, in_step=False)
        export_hugging_face(
            self.engine,
            self.folder / "hf",
            Path(run.model.path),
            DTYPES[run.model.dtype],
            tokenizer=Path(run.data.tokenizer) if run.data.tokenizer else None,
            # A model that is served with another template than it was trained with answers worse.
            chat_template=self.prepared.chat_template() if run.data.chat_template else None,
        )
        self.timeline.add("export", self.num_steps, time.monotonic() - begin)

    def open_sinks(self, done: int) -> list[Sink]:
        """Where metrics go; only rank 0 writes."""
        if not self.first:
            return []
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
