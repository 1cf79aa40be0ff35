"""Hosts of their own on one machine: network namespaces around a switch (Linux, root, iproute2)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

PREFIX = "ddp-test"
INTERFACE = "train0"


def why_not() -> str:
    """Why no hosts can be made here; the empty string when they can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (package iproute2)"
    name = f"{PREFIX}-{os.getpid()}-probe"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"network namespaces are not allowed here: {done.stderr.strip()}"
    ip("netns", "del", name)
    return ""


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


class Network:
    """A switch with hosts at it. This process is at it too, with the address ``.1``."""

    def __init__(self) -> None:
        pid = os.getpid()
        self._names = f"{PREFIX}-{pid}"
        self._subnet = f"10.{200 + pid // 250 % 50}.{pid % 250}"
        self._outer: dict[str, str] = {}
        self._switch = f"{self._names}-switch"

    @classmethod
    @contextmanager
    def made(cls, *hosts: str) -> Iterator[Network]:
        """A network of these hosts, which is taken down with everything that runs on it."""
        _sweep()
        network = cls()
        with ExitStack() as stack:
            network._add(stack, network._switch)
            # The switch is in a namespace of its own, where no packet filter of this host applies.
            ip("-n", network._switch, "link", "add", "switch", "type", "bridge")
            ip("-n", network._switch, "link", "set", "switch", "up")
            network._plug(None, 1)
            for number, host in enumerate(hosts, 2):
                network._add(stack, network.namespace(host))
                network._plug(host, number)
            yield network

    def namespace(self, host: str) -> str:
        return f"{self._names}-{host}"

    def address(self, host: str) -> str:
        return f"{self._subnet}.{self._numbers(host)}"

    def start(self, host: str, log: Path, *command: str) -> subprocess.Popen[bytes]:
        """Start a Python program on a host."""
        with log.open("ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace(host), sys.executable, *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
            )

    def listeners(self, host: str) -> dict[str, set[int]]:
        """Addresses with ports that somebody on the host listens at, and who."""
        table = ip("netns", "exec", self.namespace(host), "ss", "-Hltnp")
        return {
            line.split()[3]: {int(pid) for pid in re.findall(r"pid=(\d+)", line)}
            for line in table.splitlines()
        }

    def vanish(self, host: str) -> None:
        """Cut the host off: nobody is told, and nobody answers."""
        ip("-n", self._switch, "link", "set", self._outer[host], "down")

    def reappear(self, host: str) -> None:
        ip("-n", self._switch, "link", "set", self._outer[host], "up")

    def _numbers(self, host: str) -> int:
        return list(self._outer).index(host) + 2

    def _add(self, stack: ExitStack, namespace: str) -> None:
        ip("netns", "add", namespace)
        stack.callback(_remove, namespace)
        ip("-n", namespace, "link", "set", "lo", "up")

    def _plug(self, host: str | None, number: int) -> None:
        """Connect a host, or this process, to the switch."""
        outer, inner = f"port{number}", f"ddp{os.getpid()}" if host is None else INTERFACE
        where = () if host is None else ("netns", self.namespace(host))
        at = () if host is None else ("-n", self.namespace(host))
        peer = ("peer", "name", inner, *where)
        if host is None:
            ip("link", "add", inner, "type", "veth", "peer", "name", outer, "netns", self._switch)
        else:
            self._outer[host] = outer
            ip("-n", self._switch, "link", "add", outer, "type", "veth", *peer)
        ip("-n", self._switch, "link", "set", outer, "master", "switch", "up")
        ip(*at, "addr", "add", f"{self._subnet}.{number}/24", "dev", inner)
        ip(*at, "link", "set", inner, "up")


def _sweep() -> None:
    """Remove what a run that was killed has left."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        prefix, _, rest = name.rpartition(f"{PREFIX}-")
        pid = rest.partition("-")[0]
        if not prefix and pid.isdigit() and not Path("/proc", pid).exists():
            _remove(name)


def _remove(namespace: str) -> None:
    for pid in ip("netns", "pids", namespace).split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", namespace)
