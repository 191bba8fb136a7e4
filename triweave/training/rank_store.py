"""The store at which the ranks of one host meet, in a process of its own: who starts the ranks imports no torch."""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from triweave.training.rank_server import end_with_parent

NAME = "the store of the ranks"
"""Of the process, where it is told how it ended."""


def start_store(context: ForkServerContext) -> tuple[int, Connection, BaseProcess]:
    """Start the process that keeps the store; who connects before it is there waits for it.

    Left to itself the store would listen on every interface, to anybody.

    Args:
        context: what makes processes that the server forks.

    Returns:
        The port on the loopback interface, what is closed when the process is gone, and the process.
    """
    told, tell = context.Pipe(duplex=False)
    with tell, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        keeper = context.Process(target=_keep, args=(listener, tell), name=NAME, daemon=True)
        keeper.start()
    return port, told, keeper


def _keep(listener: socket.socket, tell: Connection) -> None:
    """Keep the store until this process is ended, or the one that started it is gone; `tell` closes with it."""
    from torch._C._distributed_c10d import TCPStore

    port = listener.getsockname()[1]
    # Held in a name for as long as this process lives. The store closes the descriptor that it is given.
    store = TCPStore(  # noqa: F841
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    end_with_parent()
