"""Every collective and every message of a step, counted: those that are asked for, and none beside.

What is counted is what reaches torch's process groups, whatever Python function it came through.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import engine_for, local_batch, make_samples
from ranks import Ranks
from tiny_configs import tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from triweave.groups import Group, Groups
from triweave.layers.attention import AttentionKernel
from triweave.layers.rotary import inverse_frequencies, make_rotation
from triweave.layers.tensor_parallel import TensorParallel
from triweave.layout import Layout, even_layers
from triweave.llama import DecoderLayer
from triweave.model_spec import ModelSpec, spec_from_folder
from triweave.parameters import holds_embedding, holds_head
from triweave.training.step import evaluate_step, train_step
from verify_counts import Counts  # noqa: F401
