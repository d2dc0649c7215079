"""Cure of ``grpo-vllm-server-loss``: a vLLM server that was restarted is seen, and its completions are not used.

TRL's client sends a request again that got no answer, and hands weights over once a step alone. A server that was
restarted meanwhile has the weights of its checkpoint, and answers with completions of these, without an error: while
completions are asked for, or before an evaluation.

Newer releases of TRL generate with vLLM's own server, whose development endpoints they need to hand over weights. One
of them, ``/server_info``, says ``instance_id``: the time at which a process has made vLLM's configuration, so that
another process has another one. The cure reads it when client and server have met, and again after each answer. The
server of earlier ones is TRL's, and says nothing by which a process could be told from the one before.

The main process alone has a client, and the other ranks wait for what it got: it passes an answer that it refuses on,
and then all ranks raise together, so that none waits for one that has left.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ClassVar

from pytest_trlcompat.trainers.curing import patch_points
from pytest_trlcompat.trainers.curing.conditions import Condition, under
from pytest_trlcompat.trainers.curing.cure import Activity, Cure
from pytest_trlcompat.trainers.curing.errors import CureError
from pytest_trlcompat.trainers.curing.patching import PatchPoint, expected

__all__ = ["VLLMRestartMixin"]

VLLM_CHAT = PatchPoint("trl.generation.vllm_client:VLLMClient.chat", ">=1.11")
VLLM_GENERATE = PatchPoint("trl.generation.vllm_generation:VLLMGeneration.generate", ">=1.11")

_TIMEOUT = 60.0
"""Seconds that the server has to say who it is: the first time it looks at the machine that it runs on."""


class VLLMRestartMixin(Cure):
    """Ends a training whose vLLM server was restarted, before completions of other weights are used.

    Of any trainer that generates with TRL's ``VLLMGeneration`` and ``vllm_mode="server"``, where the server is vLLM's
    own. Asks it after each answer, which costs one request, and tells every rank what it found. Where several processes
    answer for one server (``--api-server-count``, and with data parallelism by default), each has an identity of its
    own: this is logged as a warning, and nothing is looked at.

    Raises:
        CureError: in every rank. While it is built: the server does not say who it is. While it generates: it was
            restarted, or does not say so any more.
    """

    _kinds: ClassVar = {
        "trainer": ("VLLMImagesMixin", "its __init__ calls this one's"),
        "grpo": ("VLLMImagesMixin", "its __init__ calls this one's"),
    }
    _points: ClassVar[patch_points.Points] = (patch_points.VLLM_CLIENT, VLLM_CHAT, VLLM_GENERATE)
    _needed: ClassVar = (
        Condition(
            "with a server that is vLLM's own",
            "no vLLM server is asked, or one of TRL's, which does not say who it is",
            lambda trainer: expected(patch_points.VLLM_CLIENT) and _is_served(trainer),
            needs="vllm",
        ),
    )
    accelerator: Any
    vllm_generation: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if VLLMRestartMixin._activity(type(self), self).active:
            _refuse_restarts(self.vllm_generation, self.accelerator.is_main_process)

    @classmethod
    def _activity(cls, trainer_class: type, trainer: Any) -> Activity:
        return under(trainer, "completions of a server that was restarted are refused", *cls._needed)


def _is_served(trainer: Any) -> bool:
    return getattr(getattr(trainer, "vllm_generation", None), "mode", None) == "server"


class _Refusal:
    """Why the main process refuses an answer, until every rank is told."""

    def __init__(self) -> None:
        self.is_told = False
        """Whether :meth:`tell` comes, so that nothing has to be raised before."""
        self.error: Exception | None = None

    def look(self, check: Callable[[], Any]) -> Any:
        """What ``check`` returns; its error is kept where ranks are told of it."""
        try:
            return check()
        except Exception as error:
            if not self.is_told:
                raise
            self.error = error

    def tell(self, result: Any = None) -> Any:
        """What the main process has found, in every rank; collective.

        Raises:
            Exception: in the main process what it has kept, in the others a ``CureError`` that says so.
        """
        from accelerate.utils import broadcast_object_list

        refusal, result = broadcast_object_list([None if self.error is None else str(self.error), result])
        if refusal is not None:
            raise self.error or CureError(
                VLLMRestartMixin.__name__,
                expected="completions that come from the main process",
                seen="it has refused those of its vLLM server",
                remedy=refusal,
            )
        return result


def _refuse_restarts(generation: Any, is_main: bool) -> None:
    """Have every rank raise where another process has answered than the one that weights are handed to. Collective.

    Args:
        generation: TRL's ``VLLMGeneration``, which has a client in the main process.
    """
    refusal = _Refusal()
    refusal.is_told = True
    if not refusal.tell(refusal.look(lambda: _watch(generation.vllm_client, refusal)) if is_main else None):
        return
    refusal.is_told = False
    generate = generation.generate

    @functools.wraps(generate)
    def generated(*args: Any, **kwargs: Any) -> Any:
        refusal.is_told = True
        try:
            completions = generate(*args, **kwargs)
        finally:
            refusal.is_told = False  # whoever asks the client by itself is alone
        refusal.tell()
        return completions

    generation.generate = generated


def _watch(client: Any, refusal: _Refusal) -> bool:
    """Look who answers behind each answer of the client; ``False`` where that cannot be seen."""
    config = _configuration(client)
    processes = _of(config, "parallel_config", dict).get("_api_process_count", 1)
    if processes > 1:
        logging.getLogger(__name__).warning(
            "%s: %d processes answer for the vLLM server at %s, each with an identity of its own: a restart is not "
            "seen. Serve with --api-server-count 1 to have it seen.",
            VLLMRestartMixin.__name__,
            processes,
            client.base_url,
        )
        return False
    identity = _of(config, "instance_id", str)

    def checked(ask: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ask)
        def answered(*args: Any, **kwargs: Any) -> Any:
            answer = ask(*args, **kwargs)
            # Asked after the answer: whoever gave it has been started before, and is still there.
            refusal.look(lambda: _check_answering(client, identity))
            return answer

        return answered

    for name in ("generate", "chat"):
        setattr(client, name, checked(getattr(client, name)))
    return True


def _check_answering(client: Any, identity: str) -> None:
    """
    Raises:
        CureError: it is another one.
    """
    answering = _of(_configuration(client), "instance_id", str)
    if answering != identity:
        raise CureError(
            VLLMRestartMixin.__name__,
            expected=f"an answer of the vLLM server at {client.base_url} that has the policy's weights "
            f"(instance {identity})",
            seen=f"another one has answered (instance {answering}): the server was restarted, and has the "
            "weights of its checkpoint",
            packages=("trl",),
            remedy="Train again from the last checkpoint, with the server that is there now",
        )


def _configuration(client: Any) -> dict[str, Any]:
    """What the server says of itself, as vLLM's ``VllmConfig``."""
    url = f"{client.base_url}/server_info"
    response = client.session.get(url, params={"config_format": "json"}, timeout=_TIMEOUT)
    if response.status_code != 200:
        raise _unseen(f"GET {url} is answered by {response.status_code}")
    return _of(response.json(), "vllm_config", dict)


def _of(answer: dict[str, Any], name: str, kind: type) -> Any:
    value = answer.get(name)
    if not isinstance(value, kind) or not value:
        raise _unseen(f"its {name} is {value!r}")
    return value


def _unseen(seen: str) -> CureError:
    return CureError(
        VLLMRestartMixin.__name__,
        expected="the identity of a vLLM server, instance_id of its /server_info",
        seen=seen,
        packages=("trl",),
    )
