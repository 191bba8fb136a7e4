"""`triweave schema`."""

from __future__ import annotations

import json


def schema() -> int:
    """Print the JSON schema of run files, for editors that complete and check YAML.

    Example: triweave schema > run.schema.json
    """
    from triweave.config.reference import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
