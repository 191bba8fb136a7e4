"""Follows one micro-batch through one rank of Llama-3-70B at TP 8 x PP 4 and prints shapes, collectives, gradients.

    python docs/path_of_a_tensor.py [RANK]

The stage, the pipeline and the collectives are triweave's own; the tensors are torch's fake ones, which have a shape
and no values, and so are the process groups. Seconds, and no GPU. docs/path-of-a-tensor.md explains what it prints.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triweave.catalogue import find_model
from triweave.gradients import WeightGradients
from triweave.groups import make_groups
from triweave.layers.attention import AttentionKernel
from triweave.layers.cross_entropy import vocab_parallel_cross_entropy
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout, balanced_layers
from triweave.llama import Stage, StageInput
from triweave.pipeline import Pipeline
from triweave.schedule.actions import PipelineSchedule
from triweave.schedule.build import one_forward_one_backward
from triweave.schedule.dataflow import channels
from triweave.sharding import Sharding
from triweave.training.console import layer_map
from triweave.training.engine import build_stages

SEQ = 4096
SPEC = find_model("llama-3-70b")
LAYOUT = Layout(tp=8, pp=4, layers=balanced_layers(SPEC, 4, SEQ))
ONE_MICRO_BATCH = PipelineSchedule("1f1b", 4, 1, tuple(one_forward_one_backward(rank, 4, 1) for rank in range(4)))
KINDS = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
    "c10d::send": "send",
    "c10d::recv_": "receive",
}


class Journal(TorchDispatchMode):
    """Counts every call of a process group, and prints it while `looking`; what crosses the network always."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.looking = True
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            handle = next(value for value in args if isinstance(value, torch.ScriptObject))
            whole = max((value for value in tree_leaves(args) if isinstance(value, Tensor)), key=lambda t: t.nbytes)
            self.note(KINDS[func.name()], dist.get_process_group_ranks(dist.ProcessGroup.unbox(handle)), whole)
        return func(*args, **(kwargs or {}))

    def note(self, kind: str, ranks: list[int], whole: Tensor) -> None:
        """Account one call on `whole`, the larger of its two tensors."""
        self.counts[kind] += 1
        with_whom = f"ranks {ranks[0]}-{ranks[-1]}"
        if kind in ("send", "receive"):
            (peer,) = set(ranks) - {self.rank}
            with_whom = f"{'to' if kind == 'send' else 'from'} rank {peer}"
        if self.looking or kind in ("send", "receive"):
            dtype = str(whole.dtype).removeprefix("torch.")
            print(f"     {kind} {spelt(whole)} {dtype}, {with_whom}, {whole.nbytes / 2**20:.3g} MiB")


def spelt(tensor: Tensor) -> str:
    """`[512, 1, 8192]`."""
    return str(list(tensor.shape))


def follow(stage: Stage, first_layer: int, journal: Journal) -> None:
    """Have the embedding, the first layer, the norm and the head tell their shapes, forward and backward."""
    layer = f"model.layers.{first_layer}"
    for name, module in stage.named_modules():
        if name in ("model.embed_tokens", "model.norm", "lm_head", layer) or name.startswith(f"{layer}."):
            module.register_forward_hook(shapes_of(name, journal, last=name == layer))


def shapes_of(name: str, journal: Journal, *, last: bool) -> Callable[..., None]:
    """A forward hook; after the `last` module in forward, and after the norm in backward, come the other layers."""

    def arrived(gradient: Tensor) -> None:
        journal.looking = name != "model.norm"
        print(f"  {name:40} gradient of its output {spelt(gradient)}")

    def hook(module: nn.Module, args: tuple[Any, ...], output: Tensor | tuple[Tensor, Tensor]) -> None:
        if isinstance(output, tuple):  # a norm that also passes the residual stream on
            output = output[1]
        journal.looking = not last
        weight = getattr(module, "weight", None)
        of = "" if weight is None else f"  weight {spelt(weight)}"
        print(f"  {name:40} {spelt(args[0]):15} -> {spelt(output):15}{of}".rstrip())
        output.register_hook(arrived)

    return hook


def main(rank: int) -> None:
    """Build one rank, run one micro-batch through it, complete the gradients of the step."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=LAYOUT.world_size)
    at = LAYOUT.coordinates(rank)
    where = " ".join(layer_map(LAYOUT, gpus_per_node=8)[at.pp].split())
    print(f"rank {rank} of {LAYOUT}, tensor-parallel rank {at.tp} of {where}")
    with FakeTensorMode():
        groups = make_groups(LAYOUT, SPEC, channels(ONE_MICRO_BATCH), torch.device("cpu"))
        tp = TensorParallel(groups.tp, LAYOUT.uses_sequence_parallel, weight_gradients=WeightGradients())
        stages, units, memory = build_stages(SPEC, LAYOUT, groups, tp, AttentionKernel(), torch.bfloat16, "auto")
        sharding, journal = Sharding(units, groups, memory), Journal(rank)
        activations = (SEQ // LAYOUT.tp, LAYOUT.micro_batch, SPEC.hidden_size)
        hooks = (sharding.begin, sharding.end_backward)
        pipeline = Pipeline(stages, groups, tp.weight_gradients, activations, torch.bfloat16, *hooks)
        for number, stage in stages.items():
            follow(stage, LAYOUT.layers_of(number)[0], journal)
        tokens = torch.zeros(SEQ, LAYOUT.micro_batch, dtype=torch.long)

        def loss(_: int, logits: Tensor) -> Tensor:
            return vocab_parallel_cross_entropy(logits, tokens, SPEC.vocab_size, tp)

        with journal:
            journal.looking = at.pp == 0
            pipeline.train(ONE_MICRO_BATCH, [StageInput(tokens, tokens)], loss, loss_scale=1.0)
            print("  once a step, Sharding.reduce_gradients:")
            sharding.reduce_gradients()
    print("  in all:", ", ".join(f"{count} {kind}" for kind, count in sorted(journal.counts.items())))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
