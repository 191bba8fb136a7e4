"""The data-parallel axis: what its ranks share out of weights, gradients and optimizer state.

A *unit* (a layer, the embedding, the norm, the head) is one flat buffer; its parameters are views into it. Every
rank owns an equal slice, its *shard*, of each unit's float32 master weights, moments and reduced gradients.

    shard       weights       gradient sums     master weights, moments      (Rajbhandari et al. 1910.02054)
    none        whole         whole             whole
    optimizer   whole         whole             shard                        ZeRO-1
    gradients   whole         shard             shard                        ZeRO-2
    full        shard         shard             shard                        ZeRO-3, FSDP

Ranks share out among all that hold the same part of the model, or (`shard_group`) among neighbours: then every such
group is a replica of the others, weights are gathered inside it, and the groups sum what each owns once a step.

Gradient sums are float32 and are added to by the layers themselves (`gradients.main_grad`); whole ones are
reduced once a step, sharded ones after each unit's backward. Why this is not FSDP2: docs/decisions/0002.

Read in this order:

    unit.py      one flat buffer and its collectives        overlap.py    which of them run beside what computes
    hooks.py     where a module's passes begin and end      sharding.py   all units of a rank, through a step
"""

from triweave.sharding.sharding import Sharding, Use
from triweave.sharding.unit import ALIGNMENT, Segment, Unit, filling, make_units, place_parameters

__all__ = ["ALIGNMENT", "Segment", "Sharding", "Unit", "Use", "filling", "make_units", "place_parameters"]
