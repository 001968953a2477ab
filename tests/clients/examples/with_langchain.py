"""Tools of two turns, from a stream too, and structured answers, over both APIs."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    sure: bool


@tool
def weather(now: bool) -> str:
    """The weather."""
    return "sunny"


for responses in (False, True):
    chat = ChatOpenAI(model="onesweep", base_url=sys.argv[1], max_retries=0, use_responses_api=responses)
    assert chat.with_structured_output(Answer).invoke("hi") is not None
    calling = chat.bind_tools([weather], tool_choice="required", strict=True)
    pieces = [*calling.stream("hi")]
    streamed = sum(pieces[1:], pieces[0])
    for message in (calling.invoke("hi"), streamed):
        results = [ToolMessage("sunny", tool_call_id=call["id"]) for call in message.tool_calls]
        assert results
        chat.bind_tools([weather]).invoke([HumanMessage("hi"), message, *results])
