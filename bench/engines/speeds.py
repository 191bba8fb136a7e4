"""One rank of a measurement of links, as `triweave probe` times them: the median on the slowest rank, all at once.

python -m torch.distributed.run ... bench/engines/speeds.py BYTES

Rank 0 prints the profile's curves as JSON: sums over the ranks of a host, sums over a rank of each of two hosts, and
messages between two hosts that all their ranks send together.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from card import go_first

from triweave.collectives import all_reduce
from triweave.groups import Group
from triweave.probe.session import Session


def main() -> None:
    """Measure, and print on rank 0."""
    go_first()
    size, ranks_here = int(sys.argv[1]), int(os.environ["LOCAL_WORLD_SIZE"])
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    world = Group(tuple(range(count)), rank, dist.group.WORLD)
    session = Session(world, torch.device("cpu"), small=False)
    hosts = [range(first, first + ranks_here) for first in range(0, count, ranks_here)]
    neighbours = zip(hosts[::2], hosts[1::2], strict=True)
    pairs = [pair for one, other in neighbours for pair in zip(one, other, strict=True)]
    found = {
        "host": [(n, sum_s(session, hosts, n)) for n in (4096, size // 4, size, 4 * size)],
        "pairs": [(n, sum_s(session, pairs, n)) for n in (4096, size)],
        "message": [(n, message_s(session, ranks_here, n)) for n in (4096, size)],
    }
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def sum_s(session: Session, rows: list[range] | list[tuple[int, ...]], size: int) -> float:
    """An all-reduce of `size` bytes over each row of ranks, all rows at once."""
    mine = session.group
    for row in rows:
        handle = dist.new_group(list(row))
        if session.group.rank in row:
            mine = Group(tuple(row), list(row).index(session.group.rank), handle)
    whole = session.random(size // 2)
    seconds = session.seconds(partial(all_reduce, whole, mine), mine, repeats=20)
    return session.worst([seconds])[0]


def message_s(session: Session, ranks_here: int, size: int) -> float:
    """A message of `size` bytes from every rank of the second host to its like on the third, and a word back."""
    rank, message, word = session.group.rank, session.random(size // 2), session.random(2)
    host, there = divmod(rank, ranks_here)

    def there_and_back() -> None:
        if host == 1:
            dist.send(message, 2 * ranks_here + there)
            dist.recv(word, 2 * ranks_here + there)
        elif host == 2:
            dist.recv(message, ranks_here + there)
            dist.send(word, ranks_here + there)

    return session.seconds(there_and_back, repeats=20)


if __name__ == "__main__":
    main()
