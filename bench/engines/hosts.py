"""Hosts on one machine: each a network namespace with its own name, addresses and processes, joined by a bridge.

Needs root, iproute2 and util-linux. Of the machine's own network nothing is touched.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

NET = "10.77.0"
HEAD = "head"
_ENDINGS = (signal.SIGINT, signal.SIGTERM)


class Hosts:
    """`h1` to `hN`, and the switch between them, which is a host called `head` too."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.mark = f"tw{os.getpid()}"
        self.running: dict[str, list[subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _make(self) -> None:
        # Whoever ends a bench by a signal must not leave its hosts behind.
        for number in _ENDINGS:
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
        self._clear()
        names = {f"{NET}.{number}": name for number, name in self.numbered()}
        table = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for address, name in names.items())
        for _, name in self.numbered():
            # Files here are laid over /etc by `ip netns exec`.
            folder = Path("/etc/netns") / self.space(name)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "hosts").write_text(table)
            (folder / "resolv.conf").write_text("")
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            _do("ip", "netns", "add", self.space(name))
            self.ip(name, "link", "set", "lo", "up")
        self.ip(HEAD, "link", "add", "br0", "type", "bridge")
        self.ip(HEAD, "addr", "add", f"{NET}.254/24", "dev", "br0")
        self.ip(HEAD, "link", "set", "br0", "up")
        for number, name in self.numbered()[1:]:
            peer = ("peer", "name", f"p{number}", "netns", self.space(HEAD))
            self.ip(name, "link", "add", "eth0", "type", "veth", *peer)
            self.ip(name, "addr", "add", f"{NET}.{number}/24", "dev", "eth0")
            self.ip(name, "link", "set", "eth0", "up")
            self.ip(HEAD, "link", "set", f"p{number}", "master", "br0", "up")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # A second signal, as from an impatient hand, must not stop what clears up after the first.
        for number in _ENDINGS:
            signal.signal(number, signal.SIG_IGN)
        for name in list(self.running):
            self.unplug(name)
        self._clear()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def numbered(self) -> list[tuple[int, str]]:
        """Last number of the address, and name, the head first."""
        return [(254, HEAD), *((number, f"h{number}") for number in range(1, self.count + 1))]

    def space(self, name: str) -> str:
        """The namespace of a host; of its own for each bench that runs."""
        return f"{self.mark}{name}"

    def ip(self, name: str, *words: str) -> None:
        """`ip` in a host."""
        _do("ip", "-n", self.space(name), *words)

    def shape(self, name: str, mbit: float | None) -> None:
        """Slow what a host sends down to `mbit` Mbit/s; None takes that away."""
        if mbit is None:
            with suppress(subprocess.CalledProcessError):
                _do("tc", "-n", self.space(name), "qdisc", "del", "dev", "eth0", "root")
        else:
            # What a link has saved up while it was idle it sends at once: no more than 0.2 ms' worth, or a message of
            # an activation's size would not be slowed at all. The queue holds more than all ranks send at once.
            burst = max(16_000, round(25 * mbit))
            rate = ("rate", f"{round(1e6 * mbit)}bit", "burst", str(burst), "latency", "1s")
            _do("tc", "-n", self.space(name), "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        out: Path,
    ) -> subprocess.Popen[bytes]:
        """Start a command in a host, in a process tree that `unplug` ends at once; its output goes to a file."""
        with out.open("ab") as file:
            process = subprocess.Popen(self.words(name, command), cwd=cwd, env=env, stdout=file, stderr=file)
        self.running.setdefault(name, []).append(process)
        return process

    def words(self, name: str, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` in a host."""
        tree = ("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
        named = ("bash", "-c", 'hostname "$0"; exec "$@"', name)
        return ["ip", "netns", "exec", self.space(name), *tree, *named, *command]

    def unplug(self, name: str) -> None:
        """End every process of a host at once, as when its plug is pulled."""
        for process in self.running.pop(name, []):
            process.kill()
            process.wait()

    def _clear(self) -> None:
        spaces = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout.split()
        for _, name in self.numbered():
            if self.space(name) in spaces:
                _do("ip", "netns", "del", self.space(name))
            shutil.rmtree(Path("/etc/netns") / self.space(name), ignore_errors=True)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def obstacle(*tools: str) -> str:
    """What stands in the way of hosts here; empty if nothing does."""
    if os.geteuid() != 0:
        return "network namespaces are for root"
    missing = [tool for tool in ("ip", "tc", "unshare", *tools) if shutil.which(tool) is None]
    return f"missing: {', '.join(missing)}" if missing else ""
