"""Executes a schedule on one rank: receive, compute, send, in the order that the schedule gives.

What moves where is read from `schedule.dataflow`, the same functions that the checker and the simulator use.
Shapes of what is received come from the configuration; nothing is exchanged at start-up to learn them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from triweave.gradients import WeightGradients, Work
from triweave.graphs.rank import Graphs
from triweave.groups import Groups
from triweave.llama import Stage, StageInput
from triweave.offload import LayerKept, Offloader
from triweave.schedule.actions import Action, Kind, PipelineSchedule
from triweave.schedule.dataflow import Message, Result, makes, receives, sends

Loss = Callable[[int, Tensor], Tensor]
"""Micro-batch number and logits `[seq, batch, vocab/tp]` to the summed loss of its tokens."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a forward leaves for its backward: the input, and the output's place in the graph (not the output)."""

    x: Tensor | None
    output: GradientEdge
    kept: LayerKept | None
    """By the layer whose backward comes first, as far as it waits in host memory."""


def forwards_of(schedule: PipelineSchedule) -> PipelineSchedule:
    """The same order without the backwards: what validation runs."""
    ranks = tuple(tuple(action for action in rank if action.kind is Kind.FORWARD) for rank in schedule.ranks)
    return replace(schedule, ranks=ranks)


class Pipeline:
    """The stages of one rank, and how to run them."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        groups: Groups,
        weight_gradients: WeightGradients,
        activation_shape: tuple[int, int, int],
        dtype: torch.dtype,
        begin: Callable[[Sequence[Action]], None],
        end_backward: Callable[[], None],
        offloader: Offloader | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        """Take a rank's stages.

        Args:
            stages: virtual stages of this rank by their number.
            groups: this rank's process groups.
            weight_gradients: where the stages' layers submit weight gradients.
            activation_shape: `(seq/tp, batch, hidden)`, of everything that moves between stages.
            dtype: of the same.
            begin: called before each run, with all that this rank will do.
            end_backward: called when a stage's backward has left all its weight gradients.
            offloader: what the stages' layers move to host memory by.
            graphs: what captures the stages' layers.
        """
        self.stages = stages
        self.groups = groups
        self.weight_gradients = weight_gradients
        self.activation_shape = activation_shape
        self.dtype = dtype
        self.begin = begin
        self.end_backward = end_backward
        self.offloader = offloader or Offloader()
        self.graphs = graphs or Graphs({}, weight_gradients, None)
        self.before_action: Callable[[Action | None], None] = lambda action: None
        """Told of each action before it computes, and of None after the last one: for who measures."""
        self.after_action: Callable[[Action], None] = lambda action: None
        """Told of each action when it has computed, before the next one's message is waited for."""

    def train(self, schedule: PipelineSchedule, inputs: Sequence[StageInput], loss: Loss, loss_scale: float) -> Tensor:
        """Forward and backward of every micro-batch; gradients of `loss_scale x loss` are added to the sums.

        Returns:
            Summed loss of the micro-batches (float32 scalar), unscaled; zero on ranks without the last stage.
        """
        actions = schedule.ranks[self.groups.at.pp]
        documents = [micro_batch.documents for micro_batch in inputs]
        self.graphs.begin(actions, self.activation_shape, self.dtype, inputs[0].positions, documents)
        return _Execution(self, schedule, inputs, loss, loss_scale).run()

    def evaluate(self, schedule: PipelineSchedule, inputs: Sequence[StageInput], loss: Loss) -> Tensor:
        """Forward of every micro-batch; returns the summed loss as `train` does."""
        with torch.no_grad():
            return _Execution(self, forwards_of(schedule), inputs, loss, 1.0).run()


class _Execution:
    """One run of a schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: PipelineSchedule,
        inputs: Sequence[StageInput],
        loss: Loss,
        loss_scale: float,
    ) -> None:
        self.pipeline = pipeline
        self.schedule = schedule
        self.inputs = inputs
        self.loss = loss
        self.device = pipeline.groups.device
        self.loss_scale = torch.tensor(loss_scale, dtype=torch.float32, device=self.device)
        self.total = torch.zeros((), dtype=torch.float32, device=self.device)
        self.last_stage = schedule.num_stages - 1
        self.held: dict[tuple[int, int], Held] = {}
        self.put_off: dict[tuple[int, int], list[Work]] = {}
        self.local: dict[Result, Tensor] = {}
        self.incoming: dict[Message, tuple[Tensor, dist.Work]] = {}
        self.outgoing: deque[tuple[Tensor, dist.Work]] = deque()

    def run(self) -> Tensor:
        actions = self.schedule.ranks[self.pipeline.groups.at.pp]
        self.pipeline.begin(actions)
        messages = [receives(self.schedule, action) for action in actions]
        if messages:
            self.expect(messages[0])
        following = zip([*actions[1:], None], [*messages[1:], None], strict=True)
        for action, message, (next_action, next_message) in zip(actions, messages, following, strict=True):
            # The next message travels while this action computes, and so does what waits in host memory.
            self.expect(next_message)
            received = self.take(message)
            self.bring_back(next_action)
            self.pipeline.before_action(action)
            self.do(action, received)
            self.pipeline.after_action(action)
        self.pipeline.before_action(None)
        for _, work in self.outgoing:
            work.wait()
        return self.total

    def do(self, action: Action, received: Tensor | None) -> None:
        if action.kind is Kind.FORWARD:
            self.forward(action, received)
        elif action.kind is Kind.BACKWARD:
            self.backward(action, received)
            self.pipeline.end_backward()
        elif action.kind is Kind.BACKWARD_INPUT:
            with self.pipeline.weight_gradients.deferring() as later:
                self.backward(action, received)
            self.put_off[action.stage, action.micro_batch] = later
        else:
            with torch.no_grad():
                for work in self.put_off.pop((action.stage, action.micro_batch)):
                    work()
            self.pipeline.end_backward()

    def forward(self, action: Action, received: Tensor | None) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        x = received if received is not None else self.local.pop(Result("activation", stage - 1, micro_batch), None)
        keep = torch.is_grad_enabled()
        if x is not None and keep:
            x.requires_grad_()
        output = self.pipeline.stages[stage](x, self.inputs[micro_batch])
        if stage == self.last_stage:
            output = self.loss(micro_batch, output)
            self.total += output.detach()
        else:
            self.give(action, output.detach())
        if keep:
            self.held[stage, micro_batch] = Held(x, get_gradient_edge(output), self.pipeline.offloader.last)

    def backward(self, action: Action, received: Tensor | None) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        if stage == self.last_stage:
            grad = self.loss_scale
        elif received is not None:
            grad = received
        else:
            grad = self.local.pop(Result("gradient", stage + 1, micro_batch))
        held = self.held.pop((stage, micro_batch))
        torch.autograd.backward((held.output,), (grad,))
        if held.x is not None and held.x.grad is not None:
            self.give(action, held.x.grad)

    def bring_back(self, action: Action | None) -> None:
        """Start to bring back from host memory what a backward begins with."""
        if action is not None and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            held = self.held.get((action.stage, action.micro_batch))
            if held is not None and held.kept is not None:
                self.pipeline.offloader.bring_back(held.kept)

    def expect(self, message: Message | None) -> None:
        """Start to receive a message, once."""
        if message is None or message in self.incoming:
            return
        buffer = torch.empty(self.pipeline.activation_shape, dtype=self.pipeline.dtype, device=self.device)
        group = self.pipeline.groups.channels[message.channel]
        work = dist.irecv(buffer, group.ranks[0], group=group.handle)
        self.incoming[message] = (buffer, _started(work))

    def take(self, message: Message | None) -> Tensor | None:
        """Wait for a message and return what it brought."""
        if message is None:
            return None
        buffer, work = self.incoming.pop(message)
        work.wait()
        return buffer

    def give(self, action: Action, result: Tensor) -> None:
        """Hand a result to the stage that needs it: send it, or keep it when that stage is on this rank."""
        message = sends(self.schedule, action)
        if message is None:
            made = makes(action)
            if made is not None:
                self.local[made] = result
            return
        while self.outgoing and self.outgoing[0][1].is_completed():
            self.outgoing.popleft()
        group = self.pipeline.groups.channels[message.channel]
        result = result.contiguous()
        work = dist.isend(result, group.ranks[1], group=group.handle)
        self.outgoing.append((result, _started(work)))


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:
        raise RuntimeError("this rank is not in the channel's group")
    return work
