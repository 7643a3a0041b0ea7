"""Which types a JSON schema allows."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", type(None): "null"}
_MAX_REFERENCES = 16  # a definition may refer to itself


def json_type(value: Any) -> str:
    """JSON's name of the type of what ``json.loads`` made."""
    return _TYPES.get(type(value), "number")


def json_types(schema: Any) -> set[str | None]:
    """The types that a JSON schema allows. None among them: any type."""
    if not isinstance(schema, dict):
        return {None}
    if isinstance(named := schema.get("type"), str):
        return {named}
    listed = {name: found for name, found in schema.items() if isinstance(found, list)}
    if "type" in listed:
        return {each for each in listed["type"] if isinstance(each, str)}
    if branches := listed.get("anyOf") or listed.get("oneOf"):
        return set().union(*map(json_types, branches))
    if every := [types for types in map(json_types, listed.get("allOf", ())) if None not in types]:
        return set.intersection(*every)
    values = [schema["const"]] if "const" in schema else listed.get("enum", [])
    return {json_type(value) for value in values} or {None}


def resolved(schema: Any, root: Any) -> Any:
    """``schema`` with what it and its branches refer to in the definitions of ``root``."""
    schema = _followed(schema, root)
    if not isinstance(schema, dict):
        return schema
    branches = {name: schema[name] for name in ("anyOf", "oneOf", "allOf") if isinstance(schema.get(name), list)}
    return {**schema, **{name: [_followed(each, root) for each in found] for name, found in branches.items()}}


def _followed(schema: Any, root: Any) -> Any:
    """``schema`` with what it refers to in place of the reference, also through other references."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str):
            break
        found = root
        for name in reference.split("/")[1:]:
            key = unquote(name).replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        if not isinstance(found, dict):
            break
        schema = {**found, **{name: value for name, value in schema.items() if name != "$ref"}}
    return schema
