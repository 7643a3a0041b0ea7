"""Tools of the Responses API. The model sees the functions of a namespace by qualified names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_mesh.serving.requests import leave_out_tools


def qualified_name(given: Mapping[str, Any]) -> str:
    """The name that the model sees. ``given``: a function, a call or a tool_choice, with a namespace or without."""
    name: str = given["name"]
    namespace = given.get("namespace")
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def shown_functions(tools: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
    """The functions of ``tools`` as the model sees them, and the client's name and namespace of those in namespaces.

    Others are left out. Raises RequestError if there are only others.
    """
    shown: list[dict[str, Any]] = []
    origins: dict[str, dict[str, str]] = {}
    others: list[str] = []
    for tool in tools:
        kind = tool.get("type", "function")
        if kind == "namespace":
            for function in tool["tools"]:
                function = function.get("function", function)
                origin = {"name": function["name"], "namespace": tool["name"]}
                about = "\n\n".join(filter(None, (tool.get("description"), function.get("description"))))
                name = qualified_name(origin)
                shown.append({**function, "name": name, **({"description": about} if about else {})})
                origins[name] = origin
        elif kind == "function":
            shown.append(dict(tool.get("function", tool)))
        else:
            others.append(kind)
    leave_out_tools(others, shown)
    return shown, origins
