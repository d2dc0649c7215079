"""Streams and events: torch's own, which take the current accelerator where no device is named.

Which stream is current is asked of the device itself, since ``torch.accelerator`` came with torch 2.6.
"""

from __future__ import annotations

import torch

from torch_npu import _C
from torch_npu._missing import lacking
from torch_npu.npu._index import Device, index_of

__all__ = ["Event", "Stream", "StreamContext", "current_stream", "default_stream", "set_stream", "stream"]

Stream = torch.Stream
Event = torch.Event


def current_stream(device: Device = None) -> torch.Stream:
    index = index_of(device)
    return _stream(index, _C.current_stream(index))


def default_stream(device: Device = None) -> torch.Stream:
    return _stream(index_of(device), 0)


def _stream(index: int, stream_id: int) -> torch.Stream:
    device_type = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=stream_id, device_index=index, device_type=device_type)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        _C.set_device(stream.device_index)
        _C.set_stream(stream.device_index, stream.stream_id)


class StreamContext:
    """Makes ``stream`` current for as long as the context lasts; None changes nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream
        self.previous: torch.Stream | None = None

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            self.previous = current_stream(self.stream.device)
            set_stream(self.stream)
        return self.stream

    def __exit__(self, *_exception: object) -> None:
        set_stream(self.previous)


stream = StreamContext


__getattr__ = lacking("torch.npu.streams")
