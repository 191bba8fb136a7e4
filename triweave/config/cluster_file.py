"""The cluster that a run file or a command line names: in one word, or by the path of a cluster file."""

from __future__ import annotations

from pathlib import Path

from triweave.cluster import Cluster, ClusterConfig, cluster_from_config, parse_cluster


def cluster_of(text: str) -> Cluster:
    """`NODESxGPUSxGPU`, or the cluster that a `.yaml` file describes.

    Raises:
        InputError: a word that `parse_cluster` refuses, or a file that is not a cluster's; every problem of the file.
    """
    path = Path(text)
    if path.suffix not in (".yaml", ".yml"):
        return parse_cluster(text)
    from triweave.config.load import load  # Only who has a file waits for what reads files.

    return cluster_from_config(load(ClusterConfig, path, called="cluster file"), path)
