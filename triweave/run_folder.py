"""What a run leaves in its folder, in names and bytes: who writes it and who reads or sizes it say the same."""

from __future__ import annotations

STOPPED_FILE = "stopped.json"
"""There while a run stands stopped on request: engines ask it, for torchrun leaves with 1 whatever its ranks say."""

SAVE_NOW_FILE = "save-now"
"""Made by a person in the folder of a running job: it saves after the step, and removes the file."""

MASTER_BYTES = 4
"""Of a parameter in a checkpoint: its master weight, float32. `moments.MOMENTS_BYTES` come on top."""

EXPORTED_BYTES = 2
"""Of a parameter in the exported Hugging Face folder of a bf16 run."""
