"""The official client and a token model: chats by its template, ends, stops and usage in tokens."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai as api
import pytest
from openai import OpenAI

from stages.model.llama import LlamaStage
from tests.conftest import PATIENCE_S
from tests.serving.gateway.conftest import run
from tests.serving.pretrained import ids, text_of, write_model, written

MESSAGES: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "the sea"}]
SPELLED = "<|begin|>system: be kind\n<|begin|>user: the sea\nassistant: "
SEED, MOST = 5, 24


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[LlamaStage]:
    return write_model(tmp_path_factory.mktemp("unended"))


@pytest.fixture(scope="module")
def answer(stages: list[LlamaStage]) -> list[int]:
    """What the model says to MESSAGES, to its end: its last token ends texts."""
    tokens = written(stages, ids(SPELLED), MOST, temperature=0.8, seed=SEED)
    at = next(i for i in range(8, MOST) if tokens[i] not in tokens[:i])
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


def test_a_chat_ends_where_the_model_ends_it(chat: OpenAI, answer: list[int]) -> None:
    asked: dict[str, Any] = {"model": "onesweep-ar", "messages": MESSAGES, "temperature": 0.8, "seed": SEED}
    said: Any = chat.chat.completions.create(**asked, max_tokens=MOST)
    (choice,) = said.choices
    assert (choice.message.content, choice.finish_reason) == (text_of(answer), "stop")
    assert said.usage.prompt_tokens == len(ids(SPELLED))
    assert said.usage.completion_tokens == len(answer)
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


def test_what_the_template_or_the_model_does_not_take_is_said(chat: OpenAI) -> None:
    with pytest.raises(api.BadRequestError, match="the hosts have no chain of blocks"):
        chat.chat.completions.create(model="onesweep-sweep", messages=MESSAGES)
    with pytest.raises(api.BadRequestError, match=r"\d+ tokens\) and output \(510\) together"):
        chat.chat.completions.create(model="onesweep-ar", messages=MESSAGES, max_tokens=510)
