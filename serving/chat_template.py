"""A model's own chat template: how a conversation is written as one text.

Templates come with models, so they run in a sandbox: nothing of this process can be reached or changed from there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

from serving.spelling import Message
from stages.errors import CheckpointError, InputError
from stages.refusal import invalid

try:
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    raise InputError(
        f"a chat template needs the jinja2 package, which is not installed here ({error}): "
        "pip install 'onesweep[pretrained]'"
    ) from None

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser

ROLES = {"developer": "system"}
"""OpenAI's newer name of a role, and the one that templates know."""
MAX_RENDERED = 4 << 20
"""Characters of a conversation as one text."""


class _Unfit(TemplateError):
    """What a template says of messages that it does not take."""


class _Generation(Extension):
    """`{% generation %}`: marks for training what the model wrote, and stands for what is in it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template, as `transformers` renders such: blocks leave no blank lines, and the model's turn is begun."""

    def __init__(self, source: str, bos_token: str, eos_token: str) -> None:
        """Raises CheckpointError for what is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_unfit, strftime_now=_now)
        environment.filters["tojson"] = _json
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise CheckpointError(f"the chat template is damaged (line {error.lineno}): {error.message}") from None
        self._given = {"bos_token": bos_token, "eos_token": eos_token, "tools": None, "documents": None}

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation so far, and the beginning of the model's turn. Raises Refusal."""
        told = [{"role": ROLES.get(message.role, message.role), "content": message.content} for message in messages]
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=told, add_generation_prompt=True, **self._given):
                pieces.append(piece)
                length += len(piece)
                if length > MAX_RENDERED:
                    raise invalid(f"the messages take more than {MAX_RENDERED} characters in the model's chat template")
        except SecurityError as error:
            raise invalid(f"the model's chat template does what it may not: {error}") from None
        except _Unfit as error:
            raise invalid(f"the model's chat template does not take these messages: {error.message}") from None
        except (RecursionError, MemoryError) as error:
            raise invalid(f"the model's chat template does not end: {error}") from None
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise invalid(f"the model's chat template fails with these messages: {error}") from None
        return "".join(pieces)


def _unfit(message: object) -> NoReturn:
    raise _Unfit(str(message)[:200])


def _json(value: object, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: ANN401
    """Jinja's own spells `<`, `>`, `&` and `'` in numbers, for pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(form: str) -> str:
    return datetime.now(UTC).strftime(form)
