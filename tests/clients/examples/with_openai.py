"""Chats, tools and responses of two turns, histories by `model_dump`; structured answers and streams."""

import sys

from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    sure: bool


client = OpenAI(base_url=sys.argv[1], max_retries=0)
ask = [{"role": "user", "content": "hi"}]
shape = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": False}
tool = {"name": "weather", "description": "of today", "parameters": shape, "strict": True}
tools = [{"type": "function", "function": tool}]

completion = client.chat.completions.create(
    model="onesweep", messages=ask, tools=tools, tool_choice="required", max_tokens=100
)
message = completion.choices[0].message
results = [{"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls]
history = [*ask, message.model_dump(), *results]
with client.chat.completions.stream(model="onesweep", messages=history, tools=tools) as stream:
    assert any(event.type == "chunk" for event in stream)
parsed = client.chat.completions.parse(model="onesweep", messages=ask, response_format=Answer, max_tokens=100)
assert isinstance(parsed.choices[0].message.parsed, Answer)

first = client.responses.create(
    model="onesweep", input=ask, tools=[{"type": "function", **tool}], tool_choice="required", store=False
)
items = first.model_dump()["output"]
outputs = [{"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"} for item in items]
second = client.responses.create(model="onesweep", input=[*ask, *items, *outputs], max_output_tokens=10)
assert second.status in ("completed", "incomplete")
assert client.responses.parse(model="onesweep", input=ask, text_format=Answer).output_parsed is not None
