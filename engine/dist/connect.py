"""From processes to a group: who starts whom, and over what they talk."""

import logging
import socket
from datetime import timedelta
from typing import Any

import torch.distributed

from engine.dist.collectives import Collectives, TorchCollectives
from engine.dist.control import GlooControl
from engine.dist.group import Group
from engine.dist.launch import Processes
from engine.dist.mapped import with_mapped_memory
from engine.dist.pynccl import Library, PyNccl
from engine.dist.torchrun import MEET_S, Place, launched, meet, open_room
from engine.dist.watch import STEP_TIMEOUT_S, Watch
from engine.errors import ConfigError

_log = logging.getLogger(__name__)
c10d: Any = torch.distributed  # its stubs lack half of what it exports
_HERE = "127.0.0.1"
_IDLE_S = 30 * 24 * 3600.0
"""An engine may wait for its caller; ranks that end are noticed by their closed connections."""


def check_devices(size: int, device: torch.device) -> None:
    """Refuse more ranks of one host than it has devices.

    Raises:
        ConfigError: There are too few.
    """
    if device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"-tp {size} needs {size} CUDA devices, there are {torch.cuda.device_count()}",
            "lower -tp, or show more devices with CUDA_VISIBLE_DEVICES",
        )


def lead(size: int, device: torch.device, all_reduce: str = "auto") -> Group:
    """Be rank 0: start the others, or meet those that torchrun has started.

    Args:
        size: Ranks in all.
        device: Where this one computes; the others use the same kind.
        all_reduce: auto, or nccl for no other way.

    Raises:
        ConfigError: There are too few devices.
        DSparkError: The ranks cannot be brought together.
    """
    if size == 1:
        return Group()
    place, watch = launched(), Watch()
    if place is not None:
        kind = {"device": device.type, "all_reduce": all_reduce}
        return join_room(place, open_room(meet(place), kind), kind, watch)
    check_devices(size, device)
    store = c10d.TCPStore(_HERE, 0, None, True, timedelta(seconds=MEET_S), False)
    boot = {"size": size, "port": store.port, "device": device.type, "all_reduce": all_reduce}
    processes = Processes(size, boot, watch)
    try:
        group = connect(store, 0, size, device, watch, hostname=_HERE, all_reduce=all_reduce)
        group.stop = processes.stop
        return group
    except BaseException:
        processes.stop(at_once=True)
        raise


def join(boot: dict[str, Any], watch: Watch) -> Group:
    """Be another rank, started by `lead`.

    Args:
        boot: What `lead` wrote.
        watch: This process's.
    """
    store = c10d.TCPStore(_HERE, boot["port"], None, False, timedelta(seconds=MEET_S), False)
    device = own_device(boot["device"], boot["rank"])
    how = boot["all_reduce"]
    return connect(
        store, boot["rank"], boot["size"], device, watch, hostname=_HERE, all_reduce=how
    )


def join_room(place: Place, room: Any, kind: dict[str, str], watch: Watch) -> Group:
    """Be a rank that torchrun has started.

    Args:
        place: This process.
        room: A store of the ranks' own.
        kind: What the room is for: `device` (cpu or cuda) and `all_reduce`.
        watch: This process's.
    """
    device, how = own_device(kind["device"], place.local_rank), kind["all_reduce"]
    return connect(room, place.rank, place.size, device, watch, all_reduce=how)


def own_device(kind: str, local_rank: int) -> torch.device:
    """This rank's device, made current."""
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    return torch.device(kind)


def connect(
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    watch: Watch,
    *,
    hostname: str | None = None,
    all_reduce: str = "auto",
) -> Group:
    """Make a group of ranks that share a store.

    Args:
        store: A torch.distributed store.
        rank: This rank.
        size: Ranks in all.
        device: Where it computes.
        watch: This process's.
        hostname: Address that gloo listens at; None: the host's own.
        all_reduce: On GPUs: auto, or nccl for no other way.
    """
    control = GlooControl(_gloo(store, "control", rank, size, hostname, _IDLE_S))
    hosts = control.exchange(socket.gethostname())
    ranks: Collectives
    if device.type == "cuda":
        ranks = _nccl(store, rank, size, device, control)
        if all_reduce == "auto" and len(set(hosts)) == 1:
            ranks, reason = with_mapped_memory(ranks, control, device)
            if reason:
                _log.info("all-reduce through NCCL only: %s", reason)
    else:
        backend = _gloo(store, "tensors", rank, size, hostname, STEP_TIMEOUT_S)
        ranks = TorchCollectives(backend, "gloo")
    watch.on_failure(ranks.abort)
    return Group(ranks, control, watch, hosts.count(hosts[rank]))


def _gloo(
    store: Any, name: str, rank: int, size: int, hostname: str | None, timeout: float
) -> Any:
    options: Any = c10d.ProcessGroupGloo._Options()
    make = c10d.ProcessGroupGloo
    options._devices = [
        make.create_device(hostname=hostname) if hostname else make.create_default_device()
    ]
    options._timeout = timedelta(seconds=timeout)
    return make(c10d.PrefixStore(name, store), rank, size, options)


def _nccl(
    store: Any, rank: int, size: int, device: torch.device, control: GlooControl
) -> Collectives:
    """pynccl where every rank can, else torch's NCCL on every rank."""
    try:
        library: Library | None = Library()
    except OSError:
        library = None
    if all(control.exchange(library is not None)) and library is not None:
        name = control.tell(library.unique_id() if rank == 0 else None)
        return PyNccl(library, rank, size, name, device)
    _log.info("exchanges go through torch.distributed: torch has loaded no libnccl of its own")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=STEP_TIMEOUT_S)
    backend = c10d.ProcessGroupNCCL(c10d.PrefixStore("nccl", store), rank, size, options)
    return TorchCollectives(backend, "torch's NCCL")
