"""The official client and a token model: chats by its template, ends, stops and usage in tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai as api
import pytest
import torch
from openai import OpenAI

from stages.model.llama import LlamaStage
from tests.conftest import PATIENCE_S
from tests.serving.gateway.conftest import run
from tests.serving.pretrained import ids, text_of, write_model, written

MESSAGES: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the sea"}]
SPELLED = "<|begin|>system: be kind\n<|begin|>user: the sea\nassistant: "
SEED, MAX = 5, 24


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[LlamaStage]:
    return write_model(tmp_path_factory.mktemp("unended"))


@pytest.fixture(scope="module")
def answer(stages: list[LlamaStage]) -> list[int]:
    """The model's answer to MESSAGES, to its end: its last token ends texts."""
    tokens = written(stages, ids(SPELLED), MAX, temperature=0.8, seed=SEED)
    at = next(i for i in range(8, MAX) if tokens[i] not in tokens[:i])
    return tokens[: at + 1]


@pytest.fixture(scope="module")
def chat(answer: list[int], tmp_path_factory: pytest.TempPathFactory, local_ring: Any) -> Iterator[OpenAI]:
    directory: Path = tmp_path_factory.mktemp("chat")
    write_model(directory / "model", ends=answer[-1:])
    with (
        local_ring(directory / "model", 3) as client,
        run(directory, "--router", client.address) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as openai,
    ):
        yield openai


def test_a_chat_ends_at_the_end_token_of_the_model(chat: OpenAI, answer: list[int]) -> None:
    asked: dict[str, Any] = {"model": "onesweep-ar", "messages": MESSAGES, "temperature": 0.8, "seed": SEED}
    answered: Any = chat.chat.completions.create(**asked, max_tokens=MAX)
    (choice,) = answered.choices
    assert (choice.message.content, choice.finish_reason) == (text_of(answer), "stop")
    assert answered.usage.prompt_tokens == len(ids(SPELLED))
    assert answered.usage.completion_tokens == len(answer)
    shorter = chat.chat.completions.create(**asked, max_tokens=4)
    assert (shorter.choices[0].finish_reason, shorter.usage and shorter.usage.completion_tokens) == ("length", 4)
    assert shorter.choices[0].message.content == text_of(answer[:4])


def test_tokens_follow_a_schema_and_end_with_it(chat: OpenAI) -> None:
    schema = {"type": "object", "properties": {"sea": {"type": "integer"}}, "required": ["sea"]}
    schema |= {"additionalProperties": False}
    asked: dict[str, Any] = {"messages": MESSAGES, "temperature": 0.8, "seed": SEED, "max_tokens": 60}
    asked |= {"response_format": {"type": "json_schema", "json_schema": {"name": "sea", "schema": schema}}}
    asked |= {"logit_bias": {str(ids("}")[0]): 5}}
    texts = {
        chat.chat.completions.create(model=model, **asked).choices[0].message.content
        for model in ("onesweep-ar", "onesweep-ar-speculative")
    }
    assert isinstance(json.loads(texts.pop() or "")["sea"], int)
    assert not texts


def test_a_request_the_model_cannot_serve_is_refused(chat: OpenAI) -> None:
    with pytest.raises(api.BadRequestError, match="the hosts have no chain of blocks"):
        chat.chat.completions.create(model="onesweep-sweep", messages=MESSAGES)
    with pytest.raises(api.BadRequestError, match=r"\d+ tokens\) and output \(510\) together"):
        chat.chat.completions.create(model="onesweep-ar", messages=MESSAGES, max_tokens=510)


def test_texts_are_tokenized_and_detokenized(chat: OpenAI) -> None:
    text = "the sea 🚢 <|end|>"
    with httpx.Client(base_url=str(chat.base_url).removesuffix("/v1/")) as http:
        for asked in ({"prompt": text}, {"content": text, "add_special": False, "model": "onesweep-ar"}):
            answered = http.post("/tokenize", json=asked).json()
            assert answered == {"tokens": ids(text), "count": len(ids(text)), "max_model_len": 512}
        answered = http.post("/detokenize", json={"tokens": ids("the sea 🚢")}).json()
        assert answered == {"prompt": "the sea 🚢", "content": "the sea 🚢"}
        for path, wrong, words in (
            ("detokenize", {"tokens": [300]}, "tokens: token 300 does not exist: the model has 0 to 299"),
            ("detokenize", {"tokens": []}, "tokens must not be empty"),
            ("tokenize", {"prompt": ""}, "give some text"),
            ("tokenize", {"prompt": "x" * 100_000}, "context of 512 tokens never holds more than"),
            ("tokenize", {"prompt": "x", "model": "onesweep-sweep"}, "cannot be served"),
        ):
            answer = http.post(f"/{path}", json=wrong)
            assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True)
            assert answer.json()["error"]["param"] == ("onesweep.mode" if "model" in wrong else next(iter(wrong)))


@torch.inference_mode()
def test_prompts_in_tokens_are_scored(chat: OpenAI, stages: list[LlamaStage]) -> None:
    prompts = [ids("the 漢 and the ship"), ids("the old man said " * 60)[:300]]
    asked: dict[str, Any] = {"model": "onesweep-ar", "prompt": prompts, "echo": True, "logprobs": 1, "temperature": 0}
    answer = chat.completions.create(**asked, max_tokens=1, seed=1234)
    for tokens, choice in zip(prompts, answer.choices, strict=True):
        x = torch.tensor([tokens])
        for stage in stages:
            x = stage.read(x)
        nats = stages[-1].next_byte(x)[0].double().log_softmax(-1)
        logprobs: Any = choice.logprobs
        expected = [float(nats[at, token]) for at, token in enumerate(tokens[1:])]
        assert logprobs.token_logprobs[1:-1] == pytest.approx(expected, abs=1e-4)
        best = [max(each.values()) for each in logprobs.top_logprobs[1:]]
        assert best == pytest.approx(nats.max(1).values.tolist(), abs=1e-4)
        assert choice.text.startswith(text_of(tokens))
        assert logprobs.text_offset[:-1] == [len(text_of(tokens[:at])) for at in range(len(tokens))], "of characters"
