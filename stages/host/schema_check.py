"""JSON schemas for texts: compiles them, and checks them in a process of bounded time and memory.

The library does not bound what even a schema of 40 bytes may consume. This module imports nothing heavy, as a check
starts it as a process.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import resource
import subprocess
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_BYTES = 16 << 10  # it travels with every hop
# Bounds the memory of one schema: up to 2 KB a state.
MAX_LEXER_STATES = 10_000
# Begins the fault message, on any host, for a text that no token can continue.
NOT_FOLLOWED = "the JSON schema cannot be followed"
ABSENT = "llguidance is not installed: pip install 'onesweep[schema]'"
# Limits of a check's process. Hosts compile the schema again between the work of others, so they bound that, too.
CHECK_CPU_S = 1
CHECK_BYTES = 2 << 30
CHECK_S = 60.0  # in case the machine is so busy that the process does not get its second of CPU time
CHECKS_AT_ONCE = 2
KEPT_VERDICTS = 256
# Tags around a call in a text, as in most chat templates.
CALL_TAG, CALL_END = "<tool_call>", "</tool_call>"
# Keyword of a schema that describes each call in a text, not the text. Its value is true, or the schema of a text
# without calls.
OF_CALLS = "x-onesweep-calls"
# A text is a call, or words, then calls and words. Only a few blanks are allowed where nothing else can come: a weak
# model writes no end of them. A lazy terminal ends at the first tag, so no tag is ever part of the words.
CALLS_GRAMMAR = rf"""
start: BLANKS json | FIRST_WORDS | first call (next call)* WORDS
first[lazy]: FIRST_WORDS "{CALL_TAG}"
next[lazy]: WORDS "{CALL_TAG}"
FIRST_WORDS: /[ \t\r\n]*([^{{ \t\r\n](.|\n)*)?/
WORDS: /(.|\n)*/
"""
# Or a text is only calls, or JSON that follows its own schema.
ANSWER_GRAMMAR = f"""
start: BLANKS json | (BLANKS "{CALL_TAG}" call)+ | BLANKS answer
answer: %json """
CALL_RULES = rf"""
call: BLANKS json BLANKS "{CALL_END}"
BLANKS: /[ \t\r\n]{{0,2}}/
json: %json """

# Keywords that llguidance refuses, the formats that it knows, and what its regular expressions lack: lookaround
# and back references.
_NOT_HELD = re.compile(
    r"if|then|else|not|uniqueItems|propertyNames|contains|(min|max)Contains|depend\w+|unevaluated\w+|"
    r"\$(dynamic\w+|recursiveRef)"
)
_FORMATS = re.compile("date|date-time|duration|email|hostname|ipv4|ipv6|time|unknown|uri|uuid")
_LOOKS = re.compile(r"\\(?P<escaped>.)|\(\?<?[=!]", re.DOTALL)
# Keywords whose values map names to schemas, and keywords whose values are not schemas.
_BY_NAME = frozenset(("$defs", "definitions", "patternProperties", "properties"))
_VALUES = frozenset(("const", "default", "enum", "examples"))


def held_part(schema: Any) -> tuple[Any, list[str]]:  # noqa: ANN401
    """The part of a JSON schema that texts can be held to, and the keywords left out of it, with the value of a format
    or a pattern."""
    left_out = dict[str, None]()

    def held(keyword: str, value: object) -> bool:
        feature = keyword
        if keyword == "format" and isinstance(value, str) and not _FORMATS.fullmatch(value):
            feature = f"format {value}"
        elif keyword == "pattern" and isinstance(value, str) and _has_lookaround(value):
            feature = f"pattern {value}"
        elif not _NOT_HELD.fullmatch(keyword):
            return True
        # no constraint: every name is a string
        if value is not False and not (keyword == "propertyNames" and value in (True, {}, {"type": "string"})):
            left_out[feature] = None
        return False

    def part(value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, list):
            return [part(each) for each in value]
        if not isinstance(value, dict):
            return value
        kept = {keyword: each for keyword, each in value.items() if held(keyword, each)}
        for keyword, each in kept.items():
            if keyword in _BY_NAME and isinstance(each, dict):
                names = [name for name in each if keyword != "patternProperties" or held("pattern", name)]
                kept[keyword] = {name: part(each[name]) for name in names}
            elif keyword not in _VALUES:
                kept[keyword] = part(each)
        return kept

    return part(schema), [*left_out]


def _has_lookaround(pattern: str) -> bool:
    return any(found["escaped"] is None or found["escaped"] in "123456789bB" for found in _LOOKS.finditer(pattern))


def grammar_absent() -> str:
    """Why no text can be held to a schema on this machine; empty if texts can."""
    return "" if importlib.util.find_spec("llguidance") else ABSENT


def schema_problem(schema: str) -> str:
    """Why no text can be held to a JSON schema; empty if texts can. Blocks, for CHECK_S at most.

    Raises TimeoutExpired if the machine was too busy, which says nothing about the schema."""
    if (size := len(schema.encode())) > MAX_SCHEMA_BYTES:
        return f"the JSON schema has {size} bytes; the limit is {MAX_SCHEMA_BYTES}: simplify it"
    if absent := grammar_absent():
        return absent
    return _checked_apart(schema)


@lru_cache(maxsize=KEPT_VERDICTS)
def _checked_apart(schema: str) -> str:
    command = (sys.executable, "-P", "-m", "stages.host.schema_check")
    done = subprocess.run(command, input=schema.encode(), capture_output=True, timeout=CHECK_S, check=False)
    # not by the exit code: for a killed child that other code in this process has waited for, it is 0
    if not done.stdout.endswith(b"\n"):
        return f"the JSON schema takes more than {CHECK_CPU_S} s or too much memory to prepare: simplify it"
    return done.stdout.decode(errors="replace").removesuffix("\n")


def problem_of(schema: str) -> str:
    """Why no text can be held to a JSON schema; empty if texts can. Time and memory are unbounded."""
    matcher = compiled(byte_tokenizer(), schema)
    if isinstance(matcher, str) or matcher.is_error():
        words = matcher if isinstance(matcher, str) else matcher.get_error()
        return f"the JSON schema cannot be used: {words.partition(chr(10))[0][:300]}"
    return ""


class _ByteVocabulary:
    """A byte model's tokens, plus one that ends a text, which the model cannot write."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")
    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@lru_cache(maxsize=1)
def byte_tokenizer() -> LLTokenizer:
    """llguidance's tokenizer of a byte model."""
    from llguidance import LLTokenizer, TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_ByteVocabulary()))


def compiled(tokenizer: LLTokenizer, schema: str) -> LLMatcher | str:
    """A matcher of the schema's texts; an error sentence if the schema is not a JSON object."""
    from llguidance import LLMatcher, LLParserLimits

    # fixed spacing: with any white space allowed, a weak model writes nothing else
    spacing: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, overrides=spacing)
        if OF_CALLS in schema and OF_CALLS in (parsed := json.loads(schema)):
            answer, given = parsed.pop(OF_CALLS), {"x-guidance": spacing}
            grammar = CALLS_GRAMMAR if answer is True else ANSWER_GRAMMAR + json.dumps(answer | given)
            grammar += CALL_RULES + json.dumps(parsed | given)
    except (ValueError, TypeError, RecursionError) as error:
        return str(error)
    return LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(max_lexer_states=MAX_LEXER_STATES))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_BYTES, CHECK_BYTES))
    byte_tokenizer()  # keeps the library's own start out of the schema's time: it takes a second on a slow machine
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit_s = math.ceil(used.ru_utime + used.ru_stime + CHECK_CPU_S)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
    print(problem_of(sys.stdin.read()))
