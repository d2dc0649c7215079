"""Carries weights from a trainer to a vLLM server over gloo, in place of NCCL, which needs GPUs on both sides.

All that vLLM and TRL do with a weight is theirs: gathering, naming, packing into buffers, unpacking, loading. Replaced
are the group that broadcasts a buffer, vLLM's ``PyNcclCommunicator``, and the streams of CUDA on which it is filled.

Trainer and server meet at a file in a folder that is this user's alone (:mod:`.control`). What TRL hands to the server
where it would hand over its address is a token, which no address and no path looks like. TRL has had two transfers: its
own (:func:`_adapt_own_client`), to a server of its own, one weight after the other; and vLLM's
(:func:`_adapt_transfer`), to vLLM's server.
"""

from __future__ import annotations

import functools
import importlib.util
from contextlib import nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

from pytest_trlcompat.inference import control

__all__ = [
    "TransferError",
    "adapt_client",
    "adapt_extension",
    "adapt_generation",
    "adapt_server",
    "adapt_trainer",
    "communicator",
]

_TIMEOUT = timedelta(seconds=60)
"""In which the other end must answer."""


class TransferError(RuntimeError):
    """Trainer and server cannot meet."""


class _Communicator:
    """What TRL and vLLM use of a ``PyNcclCommunicator``.

    Attributes:
        group: has the attributes ``store`` and ``socket``, which a client drops when it closes the group, and
            ``barrier``.
    """

    def __init__(self, processes: Any) -> None:
        self._processes = processes
        self.group = SimpleNamespace(store=None, socket=None, barrier=self._barrier)

    def broadcast(self, tensor: Any, src: int, stream: Any = None) -> None:
        """Send a tensor of any device, or receive into it.

        Raises:
            RuntimeError: the other end is gone, or does not answer in time.
        """
        import torch
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = src
        # As bytes: gloo does not know every dtype.
        wire = tensor.detach().to("cpu", copy=False).contiguous().view(-1).view(torch.uint8)
        self._processes.broadcast([wire], options).wait()
        # In a contiguous tensor of the CPU gloo has received already: `wire` is a view of it.
        if wire.data_ptr() != tensor.data_ptr() and self._processes.rank() != src:
            tensor.copy_(wire.view(tensor.dtype).view(tensor.shape))

    def _barrier(self) -> None:
        self._processes.barrier().wait()

    def leave(self) -> None:
        """Close the connections, so that the other end need not wait for more."""
        self._processes = None


def communicator(meeting: str, port: int, rank: int, world_size: int, device: Any = None) -> _Communicator:
    """Stands for ``stateless_init_process_group`` of vLLM.

    Args:
        meeting: the token of a meeting, in the place of an address.
        port: of no use.

    Raises:
        TransferError: nobody has announced such a meeting; the other end does not come.
    """
    from torch.distributed import FileStore, ProcessGroupGloo

    try:
        path = control.meeting(meeting)
    except control.ControlError as error:
        raise TransferError(
            f"a trainer and its vLLM server on a CPU meet under a token, in a folder of this user's alone: {error}. "
            "The trainer has to run in a rank of this harness, on the software accelerator"
        ) from None
    options = ProcessGroupGloo._Options()
    # Both ends are on this machine; without an interface gloo takes the address to which the host's name resolves.
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    options._timeout = _TIMEOUT
    store = FileStore(str(path), world_size)
    store.set_timeout(_TIMEOUT)
    try:
        return _Communicator(ProcessGroupGloo(store, rank, world_size, options))
    except RuntimeError as error:
        raise TransferError(f"rank {rank} of {world_size} waited in vain at {path}: {error}") from error


def adapt_client(module: ModuleType) -> None:
    """Change ``trl.generation.vllm_client``, before 0.28 ``trl.extras.vllm_client``, in a rank on the software
    accelerator.

    Nothing is changed where vLLM is not installed, or has the transfer that it had before 0.28 while TRL asks for the
    later one: TRL then refuses this device, as it does any but CUDA's.
    """
    if hasattr(module, "PyNcclCommunicator"):
        _adapt_own_client(module)
    if not hasattr(module, "open_trainer_endpoint"):
        return
    client = module.VLLMClient
    begin = client.init_communicator

    def init_communicator(self: Any, device: Any = 0) -> None:
        import torch

        # TRL refuses any other device than CUDA's, since NCCL needs one; without an index it selects none.
        begin(self, torch.device("cuda"))

    client.init_communicator = init_communicator
    module.get_ip = control.announce_meeting  # type: ignore[attr-defined]
    _adapt_transfer()


def adapt_generation(module: ModuleType) -> None:
    """Change ``trl.generation.vllm_generation`` in a rank on the software accelerator.

    Where TRL has a server of its own, this asks CUDA for the device from which weights are sent.
    """
    if hasattr(module.VLLMGeneration, "_sync_fsdp1_params_to_vllm"):
        module.torch = _TorchWithoutCuda()  # type: ignore[attr-defined]


def adapt_trainer(module: ModuleType) -> None:
    """Change a module with a trainer of TRL before 0.28 in a rank on the software accelerator.

    There the trainers themselves ask CUDA for the device from which weights are sent.
    """
    trainers = (value for value in vars(module).values() if isinstance(value, type))
    starts = (vars(value).get("__init__") for value in trainers if value.__module__ == module.__name__)
    if hasattr(module, "VLLMClient") and any("current_device" in _names(start) for start in starts):
        module.torch = _TorchWithoutCuda()  # type: ignore[attr-defined]


def adapt_extension(module: ModuleType) -> None:
    """Change the module of a worker extension, in a server whose engine is the recording one.

    Before 0.24 it asks CUDA for its device, to see that it is not the trainer's.
    """
    if hasattr(module, "torch"):
        module.torch = _TorchWithoutCuda("server")  # type: ignore[attr-defined]


def _names(function: Any) -> tuple[str, ...]:
    return getattr(getattr(function, "__code__", None), "co_names", ())


def _adapt_own_client(module: ModuleType) -> None:
    """Change the client of TRL's own server."""
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import pynccl

    client = module.VLLMClient
    begin = client.init_communicator

    def init_communicator(self: Any, *device: Any, **options: Any) -> None:
        meeting, session = control.announce_meeting(), self.session
        address = getattr(self, "base_url", None) or f"http://{self.host}:{self.server_port}"
        # TRL closes the group of an earlier training when the interpreter exits, which a rank does not wait for.
        session.post(f"{address}/close_communicator/")
        create = utils.StatelessProcessGroup.create
        self.session = _MeetingSession(session, meeting)
        # Not by its own host: some releases also ask the server under that name.
        utils.StatelessProcessGroup.create = staticmethod(lambda host, *args, **more: create(meeting, *args, **more))
        try:
            begin(self, *device, **options)
        finally:
            self.session = session
            utils.StatelessProcessGroup.create = create

    client.init_communicator = init_communicator
    _adapt_own_transfer()
    module.PyNcclCommunicator = pynccl.PyNcclCommunicator  # type: ignore[attr-defined]
    module.torch = _TorchWithoutCuda()  # type: ignore[attr-defined]


class _MeetingSession:
    """A session of ``requests`` that tells the server where to meet, in the place of all addresses."""

    def __init__(self, session: Any, meeting: str) -> None:
        self._session, self._meeting = session, meeting

    def post(self, url: str, json: Any = None, **options: Any) -> Any:
        instead = {**json, "host": self._meeting} if isinstance(json, dict) and "host" in json else json
        return self._session.post(url, json=instead, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


@functools.cache  # once in a process, which may have both ends
def _adapt_own_transfer() -> None:
    """Let vLLM's ``StatelessProcessGroup`` and ``PyNcclCommunicator`` meet under a token, where they are given one."""
    from vllm.distributed import utils
    from vllm.distributed.device_communicators import pynccl

    create, of_nccl = utils.StatelessProcessGroup.create, pynccl.PyNcclCommunicator

    def meet(host: str, port: int, rank: int, world_size: int, *args: Any, **options: Any) -> Any:
        if control.is_token(host):
            return communicator(host, port, rank, world_size)
        if control.in_server():
            # An address can only come from somebody else's request. vLLM would connect to it, and unpickle an answer.
            raise TransferError(f"a vLLM server on a CPU meets its trainer under a token, not at the address {host!r}")
        return create(host, port, rank, world_size, *args, **options)

    def communicate(group: Any, *args: Any, **options: Any) -> Any:
        return group if isinstance(group, _Communicator) else of_nccl(group, *args, **options)

    utils.StatelessProcessGroup.create = staticmethod(meet)
    pynccl.PyNcclCommunicator = communicate


def adapt_server() -> None:
    """Change vLLM in a process whose engine is on the CPU."""
    _adapt_own_transfer()
    if importlib.util.find_spec("vllm.distributed.weight_transfer.nccl_common") is None:
        return
    from vllm import collect_env

    _adapt_transfer()
    # TRL's client asks the server how it was configured. vLLM then lists the packages, too, by pip or uv, and fails
    # where neither is installed.
    collect_env.get_pip_packages = lambda *_: ("pip3", "")


def _adapt_transfer() -> None:
    from vllm.distributed.weight_transfer import nccl_common, packed_tensor

    nccl_common.stateless_init_process_group = communicator
    nccl_common.torch = packed_tensor.torch = _TorchWithoutCuda()


class _NoStream:
    """Orders nothing: gloo's broadcast has been waited for."""

    def __init__(self, device: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _NoCuda:
    stream = nullcontext
    Stream = _NoStream

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    @staticmethod
    def current_device() -> int:
        return 0

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(uuid=self._uuid)

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch.cuda, name)


class _TorchWithoutCuda:
    """PyTorch, as these modules see it: streams that order nothing, and a device that is of no use."""

    accelerator = SimpleNamespace(current_device_index=lambda: 0)

    def __init__(self, uuid: str = "software") -> None:
        self.cuda = _NoCuda(uuid)  # no trainer has the device of an engine

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)
