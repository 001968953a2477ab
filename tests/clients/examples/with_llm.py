"""llm: extra models of its own file, over all three APIs: options, turns, schemas, tools, and its command."""

import asyncio
import json
import subprocess
import sys

import llm
from pydantic import BaseModel

URL = sys.argv[1]
MODELS = """
- {{model_id: chat, model_name: onesweep, api_base: "{url}", supports_schema: true, supports_tools: true}}
- {{model_id: responses, model_name: onesweep, api_base: "{url}", responses: true, supports_schema: true,
    supports_tools: true}}
- {{model_id: completion, model_name: onesweep, api_base: "{url}", completion: true}}
"""
llm.user_dir().mkdir(parents=True, exist_ok=True)
(llm.user_dir() / "extra-openai-models.yaml").write_text(MODELS.format(url=URL))


class Answer(BaseModel, extra="forbid"):
    """Closed: a random model would write further fields without end."""

    sure: bool


def weather(now: bool) -> str:
    """The weather."""
    return "sunny"


async def written(name: str) -> str:
    return await llm.get_async_model(name).prompt("hi", max_tokens=20, temperature=0).text()


for name in ("chat", "responses"):
    model = llm.get_model(name)
    assert model.prompt("hi", system="be brief", temperature=0, max_tokens=20).text()
    assert "sure" in json.loads(model.prompt("hi", schema=Answer).text())
    conversation = model.conversation(tools=[weather])
    for stream in (True, False):
        assert conversation.chain("hi", options={"max_tokens": 20, "temperature": 0}, stream=stream).text()
    assert asyncio.run(written(name))
    command = [sys.executable, "-m", "llm", "-m", name, "-o", "max_tokens", "20", "-o", "temperature", "0", "hi"]
    assert subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.strip()
conversation = llm.get_model("completion").conversation()
assert [conversation.prompt("hi", max_tokens=20, temperature=0).text() for _ in range(2)]
