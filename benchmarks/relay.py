"""Claim: a message between two network namespaces takes little more than the link's delay, and links have their
bandwidth.

A network in this process, for kernels without ``netem``: each namespace has a TUN device, and the relay passes on a
packet when the bandwidth of both links allows it and the delay is over. Packets are large, so their number is small.
Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import heapq
import os
import select
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Report, Row

INTERFACE = "mesh0"
_MTU = 65520
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_LATENESS_RATE = 0.05


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


@dataclass(frozen=True)
class DelayedNetwork:
    """``names``: the namespaces; rank r has ``address(r)``."""

    names: list[str]
    _relay: int

    def relay_seconds(self) -> float:
        """Processor time of the relay so far."""
        return int(Path(f"/proc/{self._relay}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def delayed_network(ranks: int, bandwidth: float, delay: float) -> Iterator[DelayedNetwork]:
    """Create a namespace for each of ``ranks``, and remove it at the end. ``bandwidth``: bytes/s of each link in each
    direction; ``delay``: seconds of each packet."""
    names = [f"mesh-{os.getpid()}-{rank}" for rank in range(ranks)]
    relay: subprocess.Popen[str] | None = None
    try:
        for rank, name in enumerate(names):
            _tool("ip", "netns", "add", name)
            _tool("ip", "-n", name, "tuntap", "add", "dev", INTERFACE, "mode", "tun")
            _tool("ip", "-n", name, "addr", "add", f"{address(rank)}/24", "dev", INTERFACE)
            _tool("ip", "-n", name, "link", "set", INTERFACE, "mtu", str(_MTU), "txqueuelen", "10000")
            for device in ("lo", INTERFACE):
                _tool("ip", "-n", name, "link", "set", device, "up")
        command = [sys.executable, __file__, "--relay", str(bandwidth), str(delay), *names]
        relay = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert relay.stdout is not None
        if relay.stdout.readline() != "ready\n":
            raise SystemExit("the relay between the namespaces has not started: see its output above")
        yield DelayedNetwork(names, relay.pid)
        if relay.poll() is not None:
            raise SystemExit(f"the relay between the namespaces ended with {relay.returncode}: see its output above")
    finally:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt this
        if relay is not None:
            relay.kill()
            relay.communicate()
        for name in names:  # also removes its device
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        signal.signal(signal.SIGINT, before)


def check_machine() -> None:
    if os.geteuid() != 0:
        raise SystemExit("this benchmark makes network namespaces: run it as root")
    if shutil.which("ip") is None:
        raise SystemExit("ip not found: this benchmark needs iproute2 (Debian: apt-get install iproute2)")


def _tool(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"`{' '.join(words)}` failed: {done.stderr.strip()}. This benchmark makes network namespaces with TUN "
            "devices; a container may not allow it."
        )


# The relay's process.


def relay(bandwidth: float, delay: float, names: Sequence[str]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_TIMERSLACK, 1)
    with contextlib.suppress(PermissionError):  # a control group may have no real-time budget
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    devices = [_device(libc, name) for name in names]
    gc.disable()
    print("ready", flush=True)
    numbers = {device: rank for rank, device in enumerate(devices)}
    sender_free, receiver_free = [0.0] * len(names), [0.0] * len(names)  # time at which each link is free, by direction
    in_flight: list[tuple[float, int, int, bytes]] = []
    count, late = 0, 0.0
    while True:
        # A timer's interrupt is late, in a virtual machine by tens of microseconds. The timer is set earlier by that
        # time, and the loop spins for the rest.
        wait = max(0.0, in_flight[0][0] - late - time.monotonic()) if in_flight else None
        ready, _, _ = select.select(devices, [], [], wait)
        now = time.monotonic()
        if wait and not ready:
            late = max(0.0, late + _LATENESS_RATE * (now - in_flight[0][0]))
        for device in ready:
            packet = os.read(device, _MTU + 16)
            destination = packet[19] - 1  # the last byte of the destination address
            if packet[0] >> 4 != 4 or not 0 <= destination < len(devices):
                continue  # IPv6 neighbour discovery
            transmission = len(packet) / bandwidth
            rank = numbers[device]
            sender_free[rank] = max(now, sender_free[rank]) + transmission
            receiver_free[destination] = max(sender_free[rank] + delay, receiver_free[destination] + transmission)
            count += 1
            heapq.heappush(in_flight, (receiver_free[destination], count, devices[destination], packet))
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(in_flight)
            with contextlib.suppress(OSError):  # the device is down: the packet is lost
                os.write(device, packet)


def _device(libc: Any, name: str) -> int:
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns to the network namespace {name}: {os.strerror(ctypes.get_errno())}")
    os.close(namespace)
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


# Measurement.

_MESSAGE = 2048  # bytes, the size of one token's hidden state
_ROUND_TRIPS = 2000
_STREAM = 256 << 20
_SLOW = 125e6  # bytes/s
_PORT = 29500


def echo(port: int) -> None:
    """Answer each message of a first connection, then one long message of a second."""
    with socket.create_server(("", port)) as server:
        peer, _ = server.accept()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with peer:
            while _received(peer, _MESSAGE):
                peer.sendall(b"x" * _MESSAGE)
        peer, _ = server.accept()
        with peer:
            _received(peer, _STREAM)
            peer.sendall(b"x")


def measure_link(host: str, port: int) -> None:
    """After a line of input print the median of half a round trip in seconds and its 90th percentile, then the bytes
    per second of a long message."""
    times = []
    with _connected(host, port) as peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sys.stdin.readline()
        for _ in range(_ROUND_TRIPS):
            begin = time.perf_counter()
            peer.sendall(b"x" * _MESSAGE)
            _received(peer, _MESSAGE)
            times.append((time.perf_counter() - begin) / 2)
    print(statistics.median(times), harness.percentile(sorted(times), 90), flush=True)
    with _connected(host, port) as peer:
        begin = time.perf_counter()
        peer.sendall(bytes(_STREAM))
        _received(peer, 1)
        speed = _STREAM / (time.perf_counter() - begin)
    print(speed)


def _connected(host: str, port: int) -> socket.socket:
    deadline = time.monotonic() + 10
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _received(peer: socket.socket, size: int) -> bool:
    remaining = size
    while remaining:
        part = len(peer.recv(min(remaining, 1 << 20)))
        if not part:
            return False
        remaining -= part
    return True


@dataclass(frozen=True)
class Link:
    """``half``: median seconds of half a round trip; ``late``: 90th percentile; ``speed``: bytes/s; ``relay``: the
    relay's seconds per packet of a round trip."""

    half: float
    late: float
    speed: float
    relay: float


def measured(bandwidth: float, delay: float) -> Link:
    with delayed_network(2, bandwidth, delay) as network:
        commands = [["ip", "netns", "exec", name, sys.executable, __file__] for name in network.names]
        with subprocess.Popen([*commands[1], "--echo", str(_PORT)]) as other:
            command = [*commands[0], "--ask", address(1), str(_PORT)]
            try:
                with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
                    assert client.stdin is not None and client.stdout is not None
                    begin = network.relay_seconds()
                    client.stdin.write("\n")
                    client.stdin.flush()
                    half, late = map(float, client.stdout.readline().split())
                    taken = network.relay_seconds() - begin
                    speed = float(client.stdout.readline())
            finally:
                other.kill()
    return Link(half, late, speed, taken / (2 * _ROUND_TRIPS))


def measure(options: Any) -> Report:
    from torch_mesh.routing.cluster_simulation import Network

    network = Network.parse(options.network)
    report = Report(f"A relay between two network namespaces: {options.network}")
    undelayed = measured(network.bandwidth, 0.0)
    link = measured(network.bandwidth, network.latency)
    slow = measured(_SLOW, network.latency)
    report.add(Row("a message without delay", 1e6 * undelayed.half, "us"))
    report.add(Row("a message", 1e6 * link.half, "us", "its delay", 1e6 * network.latency, 1.5, 1.0))
    report.add(Row("the slowest tenth", 1e6 * link.late, "us", "the median", 1e6 * link.half))
    report.add(Row("relay's processor time for a packet", 1e6 * link.relay, "us"))
    report.add(Row("a long message, link of 1 Gbit/s", slow.speed / 1e6, "MB/s", "the link", _SLOW / 1e6, 1.02, 0.9))
    report.add(Row("a long message", link.speed / 1e6, "MB/s", "the link", network.bandwidth / 1e6))
    report.details["links"] = {"without delay": asdict(undelayed), "as given": asdict(link), "1 Gbit/s": asdict(slow)}
    return report


def main() -> int:
    if sys.argv[1:2] == ["--relay"]:
        bandwidth, delay, *names = sys.argv[2:]
        relay(float(bandwidth), float(delay), names)
    if sys.argv[1:2] == ["--echo"]:
        echo(int(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["--ask"]:
        measure_link(sys.argv[2], int(sys.argv[3]))
        return 0
    parser = harness.parser(__doc__)
    parser.add_argument("--network", default="10Gbit/s,0.2ms", help="bandwidth and delay, in the syntax of simulate")
    options = parser.parse_args()
    check_machine()
    return measure(options).finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
