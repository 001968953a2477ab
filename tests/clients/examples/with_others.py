"""litellm, instructor, pydantic-ai and the agents of OpenAI: a structured answer, a tool, and a history of each."""

import sys

import instructor
import litellm
from agents import Agent as OpenAIAgent
from agents import ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL, ASK, ENDS = sys.argv[1], [{"role": "user", "content": "hi"}], ("length", "stop")
set_tracing_disabled(True)


class Answer(BaseModel, extra="forbid"):
    """Closed: a random model would write further fields without end."""

    sure: bool


asked = {"model": "openai/onesweep", "api_base": URL, "num_retries": 0, "max_tokens": 20, "temperature": 0}
message = litellm.completion(messages=ASK, **asked).choices[0].message
# a random model may end its text, too
assert litellm.completion(messages=[*ASK, message.model_dump(), *ASK], **asked).choices[0].finish_reason in ENDS
assert litellm.stream_chunk_builder([*litellm.completion(messages=ASK, stream=True, **asked)]) is not None

taught = instructor.from_openai(OpenAI(base_url=URL, max_retries=0), mode=instructor.Mode.TOOLS_STRICT)
taught.chat.completions.create(model="onesweep", messages=ASK, response_model=Answer, max_retries=0)

for kind in (OpenAIChatModel, PydanticResponsesModel):
    model = kind("onesweep", provider=OpenAIProvider(base_url=URL))
    agent = Agent(model, system_prompt="be brief", model_settings={"max_tokens": 20})
    agent.run_sync("more", message_history=agent.run_sync("hi").all_messages())

for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
    model = kind(model="onesweep", openai_client=AsyncOpenAI(base_url=URL, max_retries=0))
    agent = OpenAIAgent(name="a", model=model, output_type=Answer, model_settings=ModelSettings(max_tokens=100))
    first = Runner.run_sync(agent, "hi", max_turns=1)
    Runner.run_sync(agent, [*first.to_input_list(), *ASK], max_turns=1)
