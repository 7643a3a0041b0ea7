"""Turn the fields of a request, of any API, into a computation."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, RepetitionPenaltyLogitsProcessor

from torch_mesh.hf import cache_state
from torch_mesh.hf.generation_compat import CACHE_NAME
from torch_mesh.serving import grammars
from torch_mesh.serving.admission import shorten
from torch_mesh.serving.answers import Answer
from torch_mesh.serving.engine import Job
from torch_mesh.serving.errors import RequestError, RequestTooLongError
from torch_mesh.serving.generate_options import SEQUENCE_COUNTS, OptionError, normalize_options
from torch_mesh.serving.left_out import leave_out
from torch_mesh.serving.processors import Bias, Grammar, Penalties, Recorder, TokenLogprobs, token_logprobs
from torch_mesh.serving.prompts import Prompts
from torch_mesh.serving.requests import check_names
from torch_mesh.serving.tool_formats import AnswerFormat

_LOG = logging.getLogger(__name__)
_DEFAULT_TOKENS = 1024  # the limit of an answer, unless the request, the server or the model has one
_SCORED_ROWS = 512  # tokens of a prompt whose log-probabilities are in memory at the same time
_OPTION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of requests and of generate
_UNCHECKED = (
    "A strict tool has parameters that this server checks less than their schema says (docs/serving.md lists what is "
    "free), or not at all, where it has no grammar of the model's form."
)
# Options whose processors generate runs before those of a request, and the value that turns each off, beside None. The
# recorder of log-probabilities would see what they made of the model's logits.
_EARLY_OPTIONS: dict[str, Any] = {
    "guidance_scale": 1,
    "sequence_bias": None,
    "encoder_repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
}
# Of these, those that keep the tokens of every grammar possible.
_BESIDE_GRAMMARS = {"guidance_scale", "encoder_repetition_penalty", "exponential_decay_length_penalty"}


class Constraint(NamedTuple):
    """What an answer has to be: ``lark``, a grammar of llguidance, because of ``field`` of the request."""

    lark: str
    field: str


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Attributes:
        shown: tools that the model sees, in the form of chat completions.
        schemas: the parameters' JSON schema by name, of tools that it may call.
        required: the model must call one.
        several: the model may call more than one.
        strict: names of those whose arguments must follow the schema.
    """

    shown: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Any]
    required: bool = False
    several: bool = True
    strict: Collection[str] = ()


class Service:
    """Makes the answers of one model.

    Args:
        model: of transformers, patched.
        engine: generates.
        batches: the engine computes requests together and supports no logits processors.
        default_tokens: the limit of an answer whose request has none.
    """

    def __init__(
        self,
        served: str,
        model: Any,
        prompts: Prompts,
        engine: Any,
        batches: bool = False,
        default_tokens: int | None = None,
    ) -> None:
        self.served = served
        self.model, self.prompts, self.engine = model, prompts, engine
        self._batches = batches
        self._default_tokens = default_tokens
        for name in SEQUENCE_COUNTS:
            if (count := getattr(model.generation_config, name, None) or 1) > 1:
                _LOG.warning(
                    "The generation_config of %s has %s %d. A server generates one sequence at a time and uses 1.",
                    served,
                    name,
                    count,
                )
                setattr(model.generation_config, name, 1)

    def close(self) -> None:
        del self.model, self.prompts, self.engine

    @property
    def vocabulary(self) -> int:
        size: int = self.model.config.get_text_config(decoder=True).vocab_size
        return size

    def tools(self, given: Mapping[str, Any]) -> Tools | None:
        """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``. None: no tool may be called.

        Raises RequestError for invalid fields.
        """
        functions = [tool.get("function", tool) for tool in given.get("tools", ())]
        choice = given.get("tool_choice", "auto")
        if isinstance(choice, str) and choice not in ("none", "auto", "required"):
            raise RequestError(f"tool_choice is {choice!r}: give none, auto, required or a function.", "tool_choice")
        named = _named_function(choice) if isinstance(choice, dict) else None
        if not functions:
            if choice == "required" or named is not None:
                raise RequestError("tool_choice asks for a call, but there are no tools: give tools.", "tool_choice")
            return None
        if choice == "none":
            return None
        if self.prompts.format.tools is None:
            raise RequestError("This server does not know how this model writes tool calls: leave tools out.", "tools")
        schemas: dict[str, Any] = {}
        for each in functions:
            if each["name"] in schemas:
                raise RequestError(f"tools has two of the name {each['name']!r}: give each its own.", "tools")
            schemas[each["name"]] = each.get("parameters")
        if named is not None and named not in schemas:
            known = ", ".join(schemas)
            raise RequestError(f"tool_choice has the function {named!r}: give one of tools ({known}).", "tool_choice")
        shown = [
            {"type": "function", "function": {name: each[name] for name in each if name not in ("strict", "type")}}
            for each in functions
        ]
        return Tools(
            shown,
            schemas if named is None else {named: schemas[named]},
            required=choice == "required" or named is not None,
            several=given.get("parallel_tool_calls", True) and named is None,
            strict=[each["name"] for each in functions if each.get("strict")],
        )

    def template_arguments(self, given: Mapping[str, Any], effort: str | None, field: str) -> dict[str, Any]:
        """Variables of the chat template. ``effort``: the reasoning effort, from ``field``. Raises RequestError."""
        arguments = dict(given.get("chat_template_kwargs", {}))
        for name in arguments:
            if not self.prompts.reads(name):
                raise RequestError(
                    f"chat_template_kwargs has {name!r}, which this model's chat template does not read: leave it out.",
                    "chat_template_kwargs",
                )
        if effort is None:
            return arguments
        if self.prompts.reads("reasoning_effort"):
            return {"reasoning_effort": effort, **arguments}
        if effort == "none" and self.prompts.reads("enable_thinking"):
            return {"enable_thinking": False, **arguments}
        if effort == "none" and not self.prompts.format.reasons:
            return arguments
        raise RequestError(
            f"{field} is {effort!r}, but this model's chat template has no such setting: leave it out.", field
        )

    def answers(
        self,
        inputs: Mapping[str, Any],
        given: Mapping[str, Any],
        *,
        prompt_field: str,
        limit_field: str,
        count: int = 1,
        top: int | None = None,
        format: AnswerFormat | None = None,
        continues: bool = False,
        tools: Tools | None = None,
        schema: tuple[Mapping[str, Any], str] | None = None,
    ) -> list[Answer]:
        """Make the answers of one prompt.

        Args:
            inputs: of the model.
            given: fields of the request, by their names in chat completions.
            prompt_field: the field with the prompt.
            limit_field: the field with the number of tokens.
            count: the number of answers.
            top: record log-probabilities of the chosen and the ``top`` most probable tokens.
            format: how the model writes calls and reasoning; None for plain text.
            continues: the prompt ends within the answer's content.
            schema: the JSON schema of the answer, and its field.

        Raises RequestError for invalid fields.
        """
        prompt = inputs["input_ids"].shape[-1]
        config, field_of_limit = self._config(given, limit_field)
        prompt_end = self.prompts.decode_end(inputs) if format is not None and prompt else ""
        constraint = self._constraint(format, prompt_end, continues, tools, schema) if format is not None else None
        if constraint is not None:
            self._check_beside_grammar(config, constraint.field)
        if self._batches:
            self._check_batched(given, top, constraint)
        penalty = 1.0 if top is None else self._take_penalty(config)
        seed = given.get("seed")
        jobs = [
            Job(
                inputs,
                config,
                self._processors(given, config, prompt, top, penalty, constraint),
                seed=None if seed is None else (seed + index) % 2**63,
                own_options="generation_config" in given,
                may_shorten=field_of_limit is None,
            )
            for index in range(count)
        ]
        while True:
            try:
                self.engine.check(jobs[0], count)
                break
            except RequestTooLongError as error:
                if not jobs[0].may_shorten or not shorten(config, error):
                    error.param = field_of_limit if field_of_limit and error.room > 0 else prompt_field
                    raise
        for job in jobs:
            job.config = copy.copy(config)  # its limit may be lowered later, when there is less memory
        return [
            Answer(
                self.engine,
                job,
                self.prompts.tokenizer,
                format,
                schemas=None if tools is None else tools.schemas,
                prompt_end=prompt_end,
                continues=continues,
                stops=given.get("stop", ()),
                one_call=tools is not None and not tools.several,
            )
            for job in jobs
        ]

    def _processors(
        self,
        given: Mapping[str, Any],
        config: GenerationConfig,
        prompt: int,
        top: int | None,
        penalty: float,
        constraint: Constraint | None,
    ) -> list[LogitsProcessor]:
        """New processors for one answer.

        Args:
            prompt: its number of tokens.
            penalty: of repetitions; 1 if generate applies it.
        """
        processors: list[LogitsProcessor] = [] if top is None else [Recorder(top)]
        if penalty != 1:
            processors.append(RepetitionPenaltyLogitsProcessor(penalty))
        if biases := given.get("logit_bias"):
            processors.append(Bias(biases))
        presence, frequency = given.get("presence_penalty", 0), given.get("frequency_penalty", 0)
        if presence or frequency:
            processors.append(Penalties(presence, frequency, prompt))
        if constraint is not None:
            tokenizer = self.prompts.tokenizer
            processors.append(Grammar(tokenizer, constraint.lark, _ends(config), prompt, constraint.field))
        return processors

    def _take_penalty(self, config: GenerationConfig) -> float:
        """Turn off the repetition penalty of ``config``, and return it: it has to come after the recorder.

        Raises RequestError for other options that generate would apply before.
        """

        def option(name: str) -> Any:
            value = getattr(config, name, None)
            return getattr(self.model.generation_config, name, None) if value is None else value

        for name, neutral in _EARLY_OPTIONS.items():
            if (value := option(name)) not in (None, neutral):
                is_models = value == getattr(self.model.generation_config, name, None)
                whose, advice = ("The model's own ", "") if is_models else ("", f"{name}, or ")
                raise RequestError(
                    f"{whose}{name} changes the model's distribution before its log-probabilities are known: leave out "
                    f"{advice}logprobs and best_of.",
                    "logprobs" if is_models else name,
                )
        penalty = float(option("repetition_penalty") or 1)
        config.repetition_penalty = 1.0
        return penalty

    def _check_beside_grammar(self, config: GenerationConfig, field: str) -> None:
        """Raises RequestError for options of the request that may take away every token that the grammar of ``field``
        allows, or that write over the prompt's end."""
        theirs = self.model.generation_config
        for name, neutral in [*_EARLY_OPTIONS.items(), ("token_healing", False)]:
            allowed = (None, neutral, getattr(theirs, name, None))
            if name not in _BESIDE_GRAMMARS and getattr(config, name, None) not in allowed:
                raise RequestError(
                    f"{name} may leave no token that {field} allows: leave out {name}, or {field}.", name
                )

    def check_score(self, inputs: Mapping[str, Any]) -> None:
        """Raises RequestTooLongError for a prompt that will not fit when it is scored."""
        self.engine.kept.check(inputs["input_ids"][0], 0, self._logits_bytes(inputs))

    def _scored_together(self, inputs: Mapping[str, Any]) -> int:
        """The most tokens of a forward that scores a prompt. A model that is not known to continue from its cache with
        several tokens computes all of them together."""
        tokens: int = inputs["input_ids"].shape[-1]
        return tokens if cache_state.unsupported_reason(self.model) else _SCORED_ROWS

    def _logits_bytes(self, inputs: Mapping[str, Any]) -> int:
        """Bytes for the logits of a forward, and for the largest part of them as floats and log-probabilities."""
        rows = min(self._scored_together(inputs), inputs["input_ids"].shape[-1] - 1)
        floats = 2 * min(_SCORED_ROWS, rows) * torch.float32.itemsize
        return self.vocabulary * (rows * self.model.dtype.itemsize + floats)

    def score(self, inputs: Mapping[str, Any], top: int) -> list[TokenLogprobs | None]:
        """Compute the log-probabilities of a prompt's tokens; None for the first.

        Raises RequestTooLongError if they do not fit into memory.
        """
        ids: Tensor = inputs["input_ids"]
        found: list[TokenLogprobs | None] = [None]
        cache: Any = None
        together = self._scored_together(inputs)
        with self.engine.kept.room(ids[0], self._logits_bytes(inputs)), torch.no_grad():
            for start in range(0, ids.shape[-1] - 1, together):
                known = {} if cache is None else {CACHE_NAME: cache}
                output = self.model(input_ids=ids[:, start : start + together], use_cache=True, **known)
                cache = output[CACHE_NAME]
                following = ids[0, start + 1 : start + 1 + together].split(_SCORED_ROWS)
                for logits, tokens in zip(output.logits[0].split(_SCORED_ROWS), following, strict=False):
                    rows = logits[: len(tokens)].float().log_softmax(-1)
                    found += [token_logprobs(row, token, top) for row, token in zip(rows, tokens.tolist(), strict=True)]
        return found

    def _config(self, given: Mapping[str, Any], limit_field: str) -> tuple[GenerationConfig, str | None]:
        """Options of ``generate``, and the field that gave the limit; None for the default. Raises RequestError."""
        field: str | None = limit_field
        theirs: GenerationConfig = self.model.generation_config
        if "generation_config" in given:
            options = json.loads(given["generation_config"])
            _check_agreement(given, options, limit_field)
            config = GenerationConfig(**options)
        else:
            config = copy.deepcopy(theirs)
            config.max_new_tokens = None
        if config.eos_token_id is None:
            config.eos_token_id = theirs.eos_token_id
        if given.get(limit_field) is not None:
            config.max_new_tokens = given[limit_field]
        elif config.max_new_tokens is not None:
            field = "generation_config"
        else:
            field, config.max_new_tokens = None, self._default_limit()
        for name in _OPTION_FIELDS:
            if name in given:
                setattr(config, name, given[name])
        if given.get("temperature") is not None:
            config.do_sample = given["temperature"] > 0
        elif any(name in given for name in ("top_p", "top_k", "min_p")):
            config.do_sample = True
        samples = theirs.do_sample if config.do_sample is None else config.do_sample
        if samples and config.top_k is None:
            config.top_k = theirs.top_k or 0  # otherwise generate would use 50 if the model has none
        try:
            normalize_options(config, theirs)
        except OptionError as error:
            name = limit_field if error.name == "max_new_tokens" else error.name
            raise RequestError(str(error), name) from error
        for name in SEQUENCE_COUNTS:
            if (count := getattr(config, name, None) or 1) > 1:
                raise RequestError(
                    f"{name} is {count}: a server generates one sequence at a time. Give 1, and n for more answers.",
                    "generation_config",
                )
        if self._needs_gpu(config):
            raise RequestError(
                f"cache_implementation is {config.cache_implementation!r}, which needs a GPU, but this model is on the "
                "CPU: leave it out.",
                "cache_implementation",
            )
        return config, field

    def _needs_gpu(self, config: GenerationConfig) -> bool:
        return str(config.cache_implementation).startswith("offloaded") and self.model.device.type == "cpu"

    def _default_limit(self) -> int:
        """The limit of an answer whose request gives none, where as many tokens fit."""
        default: int = self._default_tokens or max(_DEFAULT_TOKENS, self.model.generation_config.max_new_tokens or 0)
        return default

    def _check_batched(self, given: Mapping[str, Any], top: int | None, constraint: Constraint | None) -> None:
        fields = ["seed"] if "seed" in given else []
        fields += [name for name in ("logit_bias", "presence_penalty", "frequency_penalty") if given.get(name)]
        if top is not None:  # best_of compares probabilities
            fields.append("best_of" if given.get("logprobs") is None and "best_of" in given else "logprobs")
        if constraint is not None:
            fields.append(constraint.field)
        if fields:
            raise RequestError(f"{fields[0]} is not possible with --continuous-batching: leave it out.", fields[0])

    def _constraint(
        self,
        format: AnswerFormat,
        prompt_end: str,
        continues: bool,
        tools: Tools | None,
        schema: tuple[Mapping[str, Any], str] | None,
    ) -> Constraint | None:
        """The grammar of the answer. None: any answer."""
        strict = tools is not None and self._strict(format, tools)
        required = tools is not None and tools.required
        if schema is None and not strict and not required:
            return None
        value, field = schema or (None, "tools")
        field = "tool_choice" if required else field
        grammars.check_installed(field)
        tokenizer = self.prompts.tokenizer
        calls: list[str] = []
        if tools is not None:
            calls = grammars.call_rules(tokenizer, format, tools.schemas, tools.several, tools.strict)
        lark = grammars.grammar(tokenizer, format, prompt_end, continues, value, calls, required)
        return Constraint(lark, field)

    def _strict(self, format: AnswerFormat, tools: Tools) -> bool:
        """Whether a grammar checks the arguments of strict tools. What it does not check is noted."""
        written = format.tools
        assert written is not None
        strict = [name for name in tools.schemas if name in tools.strict]
        for name in strict:
            for parameter in grammars.unchecked(written, tools.schemas[name]):
                leave_out(f"tools.strict ({name}.{parameter})", _UNCHECKED)
        return bool(strict) and (written.as_json or written.parameter is not None)


def json_schema(given: Mapping[str, Any], field: str) -> tuple[Mapping[str, Any], str] | None:
    """The schema in ``response_format``, or ``text.format`` of the Responses API, and ``field``. None: any text.

    Raises RequestError.
    """
    kind = given.get("type")
    if kind in ("text", "json_object"):
        check_names(field, given, ("type",), field)
        return None if kind == "text" else ({"type": "object"}, field)
    if kind != "json_schema":
        raise RequestError(f"{field} has the type {kind!r}: give text, json_object or json_schema.", field)
    about = given.get("json_schema", given)
    schema = about.get("schema") if isinstance(about, dict) else None
    if not isinstance(schema, dict):
        raise RequestError(f"{field} has no schema: give an object, a JSON schema.", field)
    if about is not given:
        check_names(field, given, ("type", "json_schema"), field)
    check_names(field, about, ("type", "name", "description", "schema", "strict"), field)
    return schema, field


def _named_function(choice: Mapping[str, Any]) -> str:
    """The name in ``{"type": "function", "function": {"name": ...}}``; in the Responses API the inner level is
    missing."""
    function = choice.get("function", choice)
    check_names("tool_choice", choice, ("type", "name" if function is choice else "function"), "tool_choice")
    if isinstance(function, dict):
        check_names("tool_choice.function", function, ("type", "name"), "tool_choice")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            f'tool_choice is {dict(choice)!r}: give {{"type": "function", "function": {{"name": ...}}}}.', "tool_choice"
        )
    return name


def _ends(config: GenerationConfig) -> list[int]:
    ends = config.eos_token_id
    return list(ends) if isinstance(ends, list) else [] if ends is None else [ends]


def _check_agreement(given: Mapping[str, Any], options: Mapping[str, Any], limit_field: str) -> None:
    """Raises RequestError if a request's field and its generation_config give an option different values."""
    temperature = given.get("temperature")
    fields = [(name, given.get(name), name) for name in _OPTION_FIELDS]
    fields.append((limit_field, given.get(limit_field), "max_new_tokens"))
    fields.append(("temperature", None if temperature is None else temperature > 0, "do_sample"))
    for field, value, option in fields:
        other = options.get(option)
        if value is not None and other is not None and value != other:
            raise RequestError(
                f"{field} is {given[field]}, and generation_config has {option} {json.dumps(other)}: give one of them.",
                field,
            )
