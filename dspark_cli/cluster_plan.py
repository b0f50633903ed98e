"""What a Ray cluster has, and how engines are laid on it."""

import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.config import EngineConfig
from engine.errors import ConfigError

_CUDA_SEQS, _CPU_SEQS = 256, 32
_ANSWER_S = 5.0
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_START = "start a cluster with `ray start --head`, or give --cluster local"
_PER_PACKET = 4
"""Packets to a full batch: one is done when its longest row is. Ray takes CPU for each: on two
cores 2,000 rows of the packaged pair came at 0.90 of one process with 8, at 0.93 with 4."""

PACKETS = 3 * _PER_PACKET
"""Packets at an actor: with two of three rows done it still runs a full batch. With 8 packets an
engine ran 368 rounds where one process ran 326; with 12 332, at 0.97 of its speed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How engines lie on the cluster."""

    config: EngineConfig
    """Of each engine."""

    count: int
    num_cpus: int
    """That each claims, as `num_gpus`."""

    num_gpus: int
    rows_per_packet: int


def plan_engines(config: EngineConfig, asked: int | None, nodes: list[dict[str, float]]) -> Plan:
    """Engines for a cluster: one per -tp GPUs, or on a cluster without GPUs one a node.

    An engine is one actor, and the GPUs that it claims are of one host: its ranks are processes of
    that host. Engines that have to share a node's cores run one thread each if --threads does not
    say otherwise.

    Args:
        config: The engine's settings.
        asked: Engines wanted; None: as many as there is room for.
        nodes: Each live node's resources.

    Raises:
        ConfigError: There are no GPUs, or fewer on every node than -tp.
    """
    ranks = config.tensor_parallel_size or 1
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    device = config.device
    if device == "auto":
        device = "cuda" if any(gpus) else "cpu"
    width = config.max_num_seqs or (_CUDA_SEQS if device == "cuda" else _CPU_SEQS)
    rows = max(1, width // _PER_PACKET)
    if device == "cuda":
        room = sum(each // ranks for each in gpus)
        if room == 0:
            raise ConfigError(
                f"an engine with -tp {ranks} needs {ranks} GPUs of one node; the nodes have "
                f"{sorted(gpus, reverse=True)[:8]}",
                "lower -tp, or give --device cpu",
            )
        return Plan(replace(config, device="cuda"), asked or room, ranks, ranks, rows)
    count = asked or len(nodes)
    each = -(-count // len(nodes))
    threads = config.threads or (1 if each > 1 else None)
    share = config.gpu_memory_utilization / each
    plain = replace(config, device="cpu", threads=threads, gpu_memory_utilization=share)
    return Plan(plain, count, ranks * (threads or 1), 0, rows)


def import_ray(address: str) -> Any:
    """Ray, for a cluster that is not looked for yet.

    Args:
        address: As for Cluster.

    Returns:
        The module `ray`.

    Raises:
        ConfigError: Ray is not installed, or the address is not one for this.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"--cluster {address}: a Ray client is too far away to read and write rows",
            "run the command on a node of the cluster (ray job submit, ray exec), with --cluster "
            "auto",
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    try:
        import ray
        import ray.data
    except ImportError:
        raise ConfigError(
            "--cluster needs Ray, which is not installed", "pip install 'dspark[cluster]'"
        ) from None
    return ray


def connect(address: str) -> Any:
    """Join a cluster, or start one here.

    Args:
        address: As for Cluster.

    Returns:
        The module `ray`.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    ray = import_ray(address)
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
    check_answers(address, named, ray.util.get_node_ip_address)
    before = signal.getsignal(signal.SIGTERM)
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **local)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--cluster {address}: {reason}", _START) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)  # ray.init takes it for itself
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    return ray


def check_answers(address: str, named: str, own_host: Callable[[], str]) -> None:
    """Refuse an address where nobody listens, for which Ray would wait long, deaf to signals.

    Args:
        address: As it was given.
        named: What it stands for; without a port it is left to Ray.
        own_host: Says under which address Ray looks for a cluster of this host.

    Raises:
        ConfigError: Nothing answers there.
    """
    host, _, port = named.rpartition(":")
    host = host.strip("[]")
    if not host or "/" in host or not port.isdecimal():
        return
    if host in _LOOPBACK:
        host = own_host()
    try:
        socket.create_connection((host, int(port)), _ANSWER_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"--cluster {address}: nothing answers at {named} ({reason})", _START
        ) from None
