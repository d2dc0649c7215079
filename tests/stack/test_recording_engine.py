"""The recording engine against Transformers: what it generates, from which weights, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pytest_trlcompat.inference import engine_weights
from pytest_trlcompat.inference.recording_engine import install
from pytest_trlcompat.inference.recording_engine.llm import LLM, Worker
from pytest_trlcompat.inference.recording_engine.sampling import (
    GuidedDecodingParams,
    SamplingParams,
    processed,
    with_logprobs,
)
from pytest_trlcompat.tiny import TinyModel

PROMPTS = [[3, 9, 27, 11], [5, 8, 13, 21, 34], [7]]
LONG_PROMPT = [3 + (7 * place) % 61 for place in range(40)]


@pytest.fixture(scope="module")
def tiny(tiny_qwen2: Callable[..., TinyModel]) -> TinyModel:
    return tiny_qwen2(initializer_range=0.2)


def engine(model: TinyModel, **options: Any) -> Any:
    return LLM(str(model.path), **{"dtype": "float32", "max_model_len": 32, **options})


def reference(model: TinyModel) -> Any:
    return AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager").float().eval()


def asked(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def greedy(llm: Any, prompt: list[int] = PROMPTS[0], count: int = 6) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    (output,) = llm.generate(asked([prompt]), params)
    return output.outputs[0].token_ids


def logps(network: Any, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        logits = network(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def test_greedy_completions_are_those_of_transformers(tiny: TinyModel) -> None:
    llm, network = engine(tiny), reference(tiny)
    for prompt in PROMPTS:
        expected = network.generate(
            torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
        )
        assert greedy(llm, prompt) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_are_those_of_a_forward_pass(tiny: TinyModel, mode: str) -> None:
    llm, network = engine(tiny, logprobs_mode=mode), reference(tiny)
    params = SamplingParams(n=2, temperature=0.6, max_tokens=6, logprobs=3)
    for prompt, output in zip(PROMPTS, llm.generate(asked(PROMPTS), params), strict=True):
        assert output.prompt_token_ids == prompt
        for each in output.outputs:
            expected = logps(network, prompt, each.token_ids, 0.6 if mode == "processed_logprobs" else 1.0)
            found = [step[token].logprob for step, token in zip(each.logprobs, each.token_ids, strict=True)]
            torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)
            assert each.cumulative_logprob == pytest.approx(float(expected.sum()), abs=1e-3)
            assert all(3 <= len(step) <= 4 for step in each.logprobs)
    recorded = [torch.tensor(one.logprobs) for one in llm.asked]
    for one, found in zip(llm.asked, recorded, strict=True):  # those by which tokens were chosen, in either mode
        torch.testing.assert_close(found, logps(network, one.prompt_token_ids, one.token_ids, 0.6), atol=1e-4, rtol=0)


def test_it_computes_in_the_dtype_that_it_is_asked_for(tiny: TinyModel) -> None:
    assert {each.dtype for _, each in engine(tiny)._model.named_parameters()} == {torch.float32}
    llm = LLM(str(tiny.path))
    assert {each.dtype for _, each in llm._model.named_parameters()} == {torch.bfloat16}
    prompt = PROMPTS[0]
    (output,) = llm.generate(asked([prompt]), SamplingParams(max_tokens=6, logprobs=0))
    completion = output.outputs[0]
    assert completion.logprobs is not None
    found = torch.tensor([s[t].logprob for s, t in zip(completion.logprobs, completion.token_ids, strict=True)])
    exact = logps(reference(tiny), prompt, completion.token_ids)
    assert 1e-5 < float((found - exact).abs().max()) < 0.2


def test_it_computes_with_the_weights_that_it_was_given(tiny: TinyModel) -> None:
    llm, network = engine(tiny), reference(tiny)
    before = greedy(llm)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.5)
    weights = [(name, each.detach()) for name, each in network.named_parameters()]
    assert llm._model.load_weights(iter(weights)) == {name for name, _ in weights}
    llm.reset_prefix_cache()
    expected = network.generate(
        torch.tensor([PROMPTS[0]]), max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert greedy(llm) == expected[0, len(PROMPTS[0]) :].tolist() != before
    assert [weight.name for weight in llm._model.received] == [name for name, _ in weights]
    assert llm._model.received[0].shape == tuple(weights[0][1].shape)


def with_other_weights(llm: Any, network: Any) -> None:
    """Give both another weight of the keys, which is wrong for what the engine has computed before."""
    name = "model.layers.0.self_attn.k_proj.weight"
    with torch.no_grad():
        weight = dict(network.named_parameters())[name].mul_(-3)
    llm._model.load_weights([(name, weight)])


def off(llm: Any, network: Any, prompt: list[int]) -> float:
    """By how much the log-probability of the token that follows differs from that of all of the engine's weights."""
    (output,) = llm.generate(asked([prompt]), SamplingParams(max_tokens=1, logprobs=0, seed=1))
    (step,), (token,) = output.outputs[0].logprobs, output.outputs[0].token_ids
    return abs(step[token].logprob - float(logps(network, prompt, [token])[0]))


def test_a_prefix_is_of_the_weights_that_it_was_computed_with_until_the_cache_is_reset(tiny: TinyModel) -> None:
    prompt = LONG_PROMPT[:7]
    for caches, wrong in ((True, True), (False, False)):
        llm, network = engine(tiny, enable_prefix_caching=caches, block_size=4), reference(tiny)
        off(llm, network, prompt)
        with_other_weights(llm, network)
        assert (off(llm, network, prompt) > 1e-2) is wrong
        assert llm.asked[-1].stale == (4 if wrong else 0)
        assert (off(llm, network, [*prompt, 40, 41]) > 1e-2) is wrong  # a longer prompt that begins alike
        assert off(llm, network, [6, *prompt]) < 1e-4
        assert llm.reset_prefix_cache() is True
        assert off(llm, network, prompt) < 1e-4
        assert llm.asked[-1].stale == 0


@pytest.mark.parametrize(("prompt", "blocks"), [(15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (37, 2)])
def test_the_prefix_cache_has_whole_blocks_without_the_last_token(tiny: TinyModel, prompt: int, blocks: int) -> None:
    """As vLLM: of a prompt that is all in the cache, at least the last token is computed, and with it its block."""
    llm, network = engine(tiny, max_model_len=64), reference(tiny)
    off(llm, network, LONG_PROMPT[:prompt])
    with_other_weights(llm, network)
    found = off(llm, network, LONG_PROMPT[:prompt])
    assert llm.asked[-1].stale == 16 * blocks
    assert (found > 1e-2) is (blocks > 0)


def test_blocks_of_completions_are_kept_too(tiny: TinyModel) -> None:
    llm, network = engine(tiny, block_size=4), reference(tiny)
    prompt = LONG_PROMPT[:6]
    tokens = greedy(llm, prompt, 4)  # of the last one there are no keys and values
    with_other_weights(llm, network)
    off(llm, network, [*prompt, *tokens])
    assert llm.asked[-1].stale == 8
    off(llm, network, [*prompt[:4], *prompt[5:], *tokens])
    assert llm.asked[-1].stale == 4


def test_a_block_that_was_computed_from_stale_ones_is_stale(tiny: TinyModel) -> None:
    llm, network = engine(tiny, block_size=4), reference(tiny)
    off(llm, network, LONG_PROMPT[:5])
    with_other_weights(llm, network)
    off(llm, network, LONG_PROMPT[:9])
    assert llm.asked[-1].stale == 4
    off(llm, network, LONG_PROMPT[:13])
    assert llm.asked[-1].stale == 8


def test_it_is_strict_about_names_and_shapes(tiny: TinyModel) -> None:
    llm = engine(tiny)
    with pytest.raises(KeyError, match="base_model.model.lm_head.weight"):
        llm._model.load_weights([("base_model.model.lm_head.weight", torch.zeros(1))])
    with pytest.raises(ValueError, match="model.norm.weight has the shape .*, and was given .1,."):
        llm._model.load_weights([("model.norm.weight", torch.zeros(1))])


def test_an_output_head_that_is_the_embeddings_is_not_loaded_twice(tiny_qwen2: Callable[..., TinyModel]) -> None:
    llm = engine(tiny_qwen2(tie_word_embeddings=True))
    embeddings = dict(llm._model.named_parameters())["model.embed_tokens.weight"]
    before = embeddings.clone()
    assert llm._model.load_weights([("lm_head.weight", torch.zeros(1))]) == set()
    assert torch.equal(before, embeddings)
    assert "lm_head.weight" not in dict(llm._model.named_parameters())


def test_a_sleeping_engine_neither_answers_nor_takes_weights(tiny: TinyModel) -> None:
    llm = engine(tiny, enable_sleep_mode=True)
    before = greedy(llm)
    llm.sleep(level=1)
    with pytest.raises(RuntimeError, match="sleeps"):
        greedy(llm)
    with pytest.raises(RuntimeError, match="model.norm.weight was given to a recording engine that sleeps"):
        llm._model.load_weights([("model.norm.weight", torch.zeros(64))])
    llm.wake_up(tags=["weights"])
    with pytest.raises(RuntimeError, match="sleeps: kv_cache"):
        greedy(llm)
    llm.wake_up(tags=["kv_cache"])
    assert greedy(llm) == before
    with pytest.raises(ValueError, match="nothing called cache"):
        llm.wake_up(tags=["cache"])
    with pytest.raises(ValueError, match="enable_sleep_mode=True alone"):
        engine(tiny).sleep()


def test_weights_that_were_discarded_have_to_be_given_again(tiny: TinyModel) -> None:
    llm, network = engine(tiny, enable_sleep_mode=True), reference(tiny)
    before = greedy(llm)
    llm.sleep(level=2)
    llm.wake_up()
    weights = dict(network.named_parameters())
    last = weights.pop("model.norm.weight")
    llm._model.load_weights(weights.items())
    with pytest.raises(RuntimeError, match="1 of them were not given again: model.norm.weight"):
        greedy(llm)
    llm._model.load_weights([("model.norm.weight", last)])
    assert greedy(llm) == before
    llm.sleep(level=2)
    llm.wake_up()
    llm.collective_rpc("reload_weights")
    assert greedy(llm) == before


@pytest.mark.parametrize(
    ("params", "warpers"),
    [
        (SamplingParams(temperature=0.5), []),
        (SamplingParams(temperature=0.5, top_k=5), [TopKLogitsWarper(5)]),
        (SamplingParams(temperature=0.5, top_p=0.6), [TopPLogitsWarper(0.6)]),
        (SamplingParams(temperature=0.5, min_p=0.2), [MinPLogitsWarper(0.2)]),
    ],
)
def test_tokens_are_chosen_from_the_distribution_of_transformers(params: SamplingParams, warpers: list[Any]) -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 2
    ids = torch.tensor([[3, 4]])
    expected = (logits / 0.5)[None]
    for warper in warpers:
        expected = warper(ids, expected)
    found = processed(logits, params, [3, 4])
    torch.testing.assert_close(found, expected[0].log_softmax(-1))
    assert warpers == [] or bool(found.isinf().any())


def test_repeated_tokens_are_penalised_as_in_transformers() -> None:
    logits = torch.randn(64, generator=torch.Generator().manual_seed(0))
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[3, 4, 3]]), logits[None].clone())[0]
    found = processed(logits, SamplingParams(repetition_penalty=1.7), [3, 4, 3])
    torch.testing.assert_close(found, expected.log_softmax(-1))


def test_ranks_count_from_the_most_probable_token() -> None:
    logprobs = torch.tensor([0.1, 0.6, 0.3]).log()
    found = with_logprobs(logprobs, 0, 2)
    assert {token: each.rank for token, each in found.items()} == {0: 3, 1: 1, 2: 2}


def test_seeds_and_numbers_of_completions(tiny: TinyModel) -> None:
    llm = engine(tiny, seed=3)
    seeded = SamplingParams(n=3, max_tokens=6, seed=5, ignore_eos=True)
    first, second = (llm.generate(asked([PROMPTS[0]]), seeded)[0].outputs for _ in range(2))
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    assert len({tuple(each.token_ids) for each in first}) == 3
    free = SamplingParams(max_tokens=6, ignore_eos=True)
    one, other = (engine(tiny, seed=3).generate(asked([PROMPTS[0]] * 2), free) for _ in range(2))
    assert [each.outputs[0].token_ids for each in one] == [each.outputs[0].token_ids for each in other]
    assert one[0].outputs[0].token_ids != one[1].outputs[0].token_ids
    again = engine(tiny, seed=4).generate(asked([PROMPTS[0]] * 2), free)
    assert [each.outputs[0].token_ids for each in one] != [each.outputs[0].token_ids for each in again]


def test_where_a_completion_ends(tiny: TinyModel) -> None:
    llm = engine(tiny)
    tokens = greedy(llm)
    prompt = asked([PROMPTS[0]])

    def completion(**options: Any) -> Any:
        (output,) = llm.generate(prompt, SamplingParams(temperature=0, **{"max_tokens": 6, **options}))
        return output.outputs[0]

    third = tokens.index(tokens[2]) + 1
    stopped = completion(stop_token_ids=[tokens[2]], ignore_eos=True)
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[:third], "stop")
    word = llm.get_tokenizer().decode([tokens[2]])
    assert completion(stop=word, ignore_eos=True).token_ids == tokens[:third]
    assert completion(ignore_eos=True).finish_reason == "length"
    assert len(completion(stop_token_ids=[tokens[0]], min_tokens=4, ignore_eos=True).token_ids) >= 4
    llm._ends = {tokens[0]}
    assert completion().token_ids == tokens[:1]
    assert len(completion(ignore_eos=True, max_tokens=None).token_ids) == 32 - len(PROMPTS[0])


def test_prompts_are_texts_ids_or_one_of_them_in_a_dictionary(tiny: TinyModel) -> None:
    llm = engine(tiny)
    text = llm.get_tokenizer().decode(PROMPTS[1])
    params = SamplingParams(temperature=0, max_tokens=2)
    outputs = llm.generate([text, {"prompt": text}, {"prompt_token_ids": PROMPTS[1]}, PROMPTS[1]], params)
    assert [each.prompt_token_ids for each in outputs] == [PROMPTS[1]] * 4
    (cut,) = llm.generate(text, SamplingParams(truncate_prompt_tokens=2, max_tokens=1))
    assert cut.prompt_token_ids == PROMPTS[1][-2:]
    with pytest.raises(ValueError, match="a prompt of 32 tokens, where the engine takes up to 31"):
        llm.generate([[3] * 32])
    with pytest.raises(NotImplementedError, match="takes no multi_modal_data in a prompt"):
        llm.generate([{"prompt_token_ids": [3], "multi_modal_data": {"image": object()}}])


def test_what_it_lacks_is_an_error(tiny: TinyModel) -> None:
    with pytest.raises(NotImplementedError, match="has no tensor_parallel_size=2"):
        engine(tiny, tensor_parallel_size=2)
    with pytest.raises(TypeError, match="knows no argument 'tensor_parallel'"):
        engine(tiny, tensor_parallel=2)
    with pytest.raises(NotImplementedError, match="logprobs_mode='raw_logits'"):
        engine(tiny, logprobs_mode="raw_logits")
    with pytest.raises(NotImplementedError, match="loads a model from a folder"):
        LLM("someone/model")
    with pytest.raises(AttributeError, match="stands for vLLM, has no LLM.chat"):
        engine(tiny).chat([])
    with pytest.raises(NotImplementedError, match="has no frequency_penalty"):
        SamplingParams(frequency_penalty=0.5)
    with pytest.raises(NotImplementedError, match="cannot constrain"):
        GuidedDecodingParams(regex="a+")
    with pytest.raises(ValueError, match="temperature cannot be -1"):
        SamplingParams(temperature=-1)


class Extension:
    greeting = "hello"

    def greet(self, name: str) -> tuple[str, str, int]:
        return self.greeting, name, len(list(self.model_runner.model.named_parameters()))  # type: ignore[attr-defined]


def test_the_worker_is_extended_and_sends_what_it_holds(
    tiny: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    from safetensors.torch import load

    from pytest_trlcompat.inference import control

    llm = engine(tiny, worker_extension_cls=f"{__name__}.Extension")
    held = dict(llm._model.named_parameters())
    assert llm.collective_rpc("greet", args=("world",)) == [("hello", "world", len(held))]
    assert llm.collective_rpc(lambda worker: type(worker).__mro__[1:3]) == [(Worker, Extension)]
    tmp_path.chmod(0o700)
    monkeypatch.setenv(control.CONTROL, str(tmp_path))
    with control.Inbox() as inbox, ThreadPoolExecutor(1) as pool:
        received = pool.submit(inbox.receive, 60)
        llm.collective_rpc("update_named_param", args=(f"{engine_weights.METHOD}:{inbox.token}", None, (0,)))
        content = received.result()
    assert content is not None
    sent = load(content)
    assert sent.keys() == held.keys()
    assert all(torch.equal(sent[name], held[name]) for name in held)


def test_it_is_installed_as_the_distribution_that_trl_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    from pytest_trlcompat import stack

    install("0.8.5", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert metadata.version("vllm") == "0.8.5+recording"
    assert stack.installed()["vllm"] == "0.8.5+recording"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vllm", "vllm-0.8.5+recording.dist-info"]


IMPORTS = """
import site, sys
site.addsitedir(sys.argv[1])
import vllm
import vllm.model_executor.model_loader.weight_utils
import vllm.transformers_utils.tokenizer
from vllm import LLM, RequestOutput, SamplingParams
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.parallel_state import get_world_group
from vllm.distributed.utils import StatelessProcessGroup
from vllm.sampling_params import GuidedDecodingParams, StructuredOutputsParams
from vllm.utils import get_open_port
from vllm.utils.network_utils import get_open_port
from vllm.worker.worker import Worker
assert issubclass(type("Extended", (Worker,), {}), Worker) and get_world_group().rank == 0 and get_open_port() > 0
for lacking in ("from vllm import AsyncLLM", "import vllm.lora"):
    try:
        exec(lacking)
    except ImportError as error:
        assert "vllm" in str(error)
    else:
        raise SystemExit(lacking)
print(vllm.__version__)
"""


def test_what_trl_imports_is_there_and_nothing_else(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    install("0.8.5", tmp_path)
    command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    found = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(root)})
    assert found.returncode == 0, found.stderr
    assert found.stdout == "0.8.5+recording\n"
