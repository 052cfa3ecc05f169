"""Chat templates: the text that a checkpoint's template makes of messages, as transformers' apply_chat_template does."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from cf_ops._arguments import kind_of

Message = Mapping[str, Any]

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A template of Jinja, in its sandbox with the settings, filters and functions that transformers gives it.

    Source: transformers, utils/chat_template_utils.py.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], path: str) -> None:
        """Raises ImportError without jinja2, ValueError for a template that is none."""
        try:
            from jinja2 import TemplateError
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ImportError("a chat needs the package jinja2, which is missing: pip install jinja2") from None

        def raise_exception(message: str) -> str:
            raise TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, **settings)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _generation_tag()]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        self._tokens, self._path = tokens, path
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"{path}: the chat template: {_line(error)}") from None

    @classmethod
    def open(cls, directory: str) -> ChatTemplate:
        """That of a checkpoint: chat_template.jinja, else "chat_template" of tokenizer_config.json; of several ones
        there, the one named "default".

        Raises FileNotFoundError where there is none, ValueError for files that are damaged, and what the constructor
        raises.
        """
        path = os.path.join(directory, "tokenizer_config.json")
        config: Any = {}
        if os.path.isfile(path):
            config = _json(path)
        if not isinstance(config, dict):
            raise ValueError(f"{path}: expected an object, got {kind_of(config)}")
        source = config.get("chat_template")
        of_its_own = os.path.join(directory, "chat_template.jinja")
        if os.path.isfile(of_its_own):
            path, source = of_its_own, _text(of_its_own)
        if isinstance(source, list):  # of objects with a name and a template
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if source is None:
            raise FileNotFoundError(
                f"{path}: no chat template, expected chat_template.jinja beside it, or its own chat_template"
            )
        if not isinstance(source, str):
            raise ValueError(f"{path}: chat_template: expected a text, got {kind_of(source)}")
        tokens = {}
        for name in _TOKENS:
            token = config.get(name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                tokens[name] = token
        return cls(source, tokens, path)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The text of a chat. Raises TypeError for messages that are none, ValueError for what the template refuses."""
        from jinja2 import TemplateError

        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
            raise TypeError(f"messages: expected a list of messages, got {kind_of(messages)}")
        for place, message in enumerate(messages):
            if not isinstance(message, Mapping) or "role" not in message:
                raise TypeError(f"messages[{place}]: expected a dict with 'role' and 'content', got {kind_of(message)}")
        given = {"tools": None, "documents": None, **self._tokens, **variables}
        try:
            return self._template.render(
                messages=[dict(m) for m in messages], add_generation_prompt=add_generation_prompt, **given
            )
        except (TemplateError, TypeError, KeyError, IndexError, ArithmeticError) as error:
            raise ValueError(f"{self._path}: the chat template: {_line(error)}") from None


def _generation_tag() -> Any:
    """The extension of {% generation %}, whose body is what an assistant has said: the text is the body."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationTag(Extension):
        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    return GenerationTag


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8: {error}") from None


def _json(path: str) -> Any:
    try:
        return json.loads(_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: expected JSON: {error}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
