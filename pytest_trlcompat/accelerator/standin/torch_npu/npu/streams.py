"""Streams and events: torch's own, which take the current accelerator where no device is named."""

from __future__ import annotations

import torch

from torch_npu._missing import lacking
from torch_npu.npu._index import Device, index_of

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]

Stream = torch.Stream
Event = torch.Event


def current_stream(device: Device = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("npu", index_of(device)))


def default_stream(device: Device = None) -> torch.Stream:
    device_type = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=device_type)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Makes ``stream`` current for as long as the context lasts; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self.previous: torch.Stream | None = None

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self.previous = torch.accelerator.current_stream(self.stream.device)
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *_exception: object) -> None:
        set_stream(self.previous)


stream = StreamContext


__getattr__ = lacking("torch.npu.streams")
