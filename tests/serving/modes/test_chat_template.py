"""A conversation in a model's own template: as transformers renders it, and without harm from a hostile one."""

import json

import pytest

from serving.modes.chat_template import ChatTemplate, TemplateProblem
from stages.errors import CheckpointError

HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ messages[5].content.upper() }}", "fails with these messages"),
        ("{{ ''.__class__.__mro__ }}", "uses a forbidden operation"),
        ("{{ messages.append(1) }}", "uses a forbidden operation"),
        ("{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}", "renders them to more than 4194304 characters"),
        ("{{ messages[0].content[0] * 10**7 }}", "renders them to more than 4194304 characters"),
        ("{{ 'x' * 10**9 }}", "takes too much memory"),
        (
            "{% set a = namespace(x='x') %}{% for i in range(99) %}{% set a.x = a.x ~ a.x %}{% endfor %}",
            "too much memory",
        ),
        ("{{ '%1000000000d' % 1 }}", "takes too much memory"),
        ("{% for a in range(10**9) %}{% endfor %}", "fails with these messages: Range too big"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes more than 2 s"),
        ("{{ messages[0].content ~ (messages | length + 9) ** (10 ** 9) }}", "takes more than 2 s"),
        ("{{ 1 // 0 }}", "fails with these messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not end"),
        ("{{ raise_exception('roles must alternate') }}", "rejects these messages: roles must alternate"),
    ],
)
def test_a_harmful_template_is_stopped(source: str, sentence: str) -> None:
    template = ChatTemplate("{% if messages[0].content == 'hello' %}" + source + "{% endif %}hi")
    with pytest.raises(TemplateProblem, match=sentence):
        template.render(HELLO)
    assert template.render([{"role": "user", "content": "bye"}]) == "hi", "it still serves others"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}", "a <b> & 'é'!"),
        ("{{ messages | tojson }}", """[{"role": "user", "content": "a <b> & 'é'"}]"""),
        ("{% if tools is not none or documents is not none %}tools{% endif %}", ""),
        ("{{ bos_token }}{{ '\\ud800' }}{{ add_generation_prompt }}", "<s>?True"),
    ],
)
def test_a_template_gets_the_variables_of_transformers(source: str, text: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render([{"role": "user", "content": "a <b> & 'é'"}]) == text


@pytest.mark.parametrize(
    "source", ["{{ tools | tojson }}", "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"]
)
def test_a_template_takes_tools_if_they_change_its_text(source: str) -> None:
    taught = '<tool_call> {"name": "", "arguments": {}}'
    assert "ship" in ChatTemplate(source + taught).render(HELLO, [{"function": {"name": "ship"}}])
    with pytest.raises(TemplateProblem, match="takes no tools"):
        ChatTemplate(taught).render(HELLO, [{"function": {"name": "ship"}}])
    tool = {"name": "ship", "parameters": {"type": "object", "propertyNames": {}}}
    schema = ChatTemplate(taught).call_schema([{"function": tool}], ["ship"])
    assert json.loads(schema)["$defs"] == {"ship": {"type": "object"}}, "unenforceable keywords are left out"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for %}", r"the chat template is damaged \(line 1\)"),
        ("{{ 'x' | nothing }}", r"is damaged \(line 1\): No filter named 'nothing'"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is damaged: it is nested too deeply"),
        ("{{ 7 ** (10 ** 9) }}", "the chat template takes more than 2 s"),
    ],
)
def test_an_invalid_template_is_refused_when_read(source: str, sentence: str) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        ChatTemplate(source)
