"""What the watch costs a step: the mark of an action, and the threads that look.

python bench/watch_cost.py
"""

from __future__ import annotations

import socket
import time

from torch._C._distributed_c10d import TCPStore

from triweave.recovery.watch import Watch, watching
from triweave.schedule.actions import Action, Kind

MARKS = 200_000
LOOKED_S = 10.0


def main() -> None:
    """Print both costs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    watch = Watch(0, 2, store, lambda message: None, step_limit_s=60.0, other_limit_s=60.0)
    action = Action(Kind.FORWARD, 0, 0)
    begin = time.perf_counter()
    for _ in range(MARKS):
        watch.mark(action)
    print(f"a mark: {1e9 * (time.perf_counter() - begin) / MARKS:.0f} ns")
    with watching(watch):
        used = time.process_time()
        time.sleep(LOOKED_S)
        share = (time.process_time() - used) / LOOKED_S
    print(f"the threads: {100 * share:.3f} % of one core")


if __name__ == "__main__":
    main()
