"""Agent frameworks that call tools in a loop: openai-agents and smolagents, over three APIs.

Their packages are in the dependency group "programs" of pyproject.toml.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from torch_mesh import MeshConfig

pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow

Book = Literal["Mark", "Luke"]  # short, so that calls never reach the token limit
TASK = "Find the verse about the sower."


@pytest.fixture(scope="module")
def server(serving: Callable[..., Any], folder: Path) -> Any:
    return serving(folder, MeshConfig(resident=0.5), log_level="error")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_openai_agents(kind: str, streamed: bool, server: Any) -> None:
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    looked: list[str] = []

    @agents.function_tool
    def search(book: Book) -> str:
        """Search a book of the scriptures."""
        looked.append(book)
        return f"{book} has nothing about it."

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as client:
            settings = {"tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
            agent = agents.Agent(
                name="reader",
                instructions="Answer by the scriptures.",
                tools=[search],
                model=getattr(agents, kind)(model=server.model, openai_client=client),
                model_settings=agents.ModelSettings(**settings),
                reset_tool_choice=False,
            )
            if not streamed:
                return await agents.Runner.run(agent, TASK, max_turns=3)
            result = agents.Runner.run_streamed(agent, TASK, max_turns=3)
            async for _ in result.stream_events():
                pass
            return result

    with pytest.raises(agents.MaxTurnsExceeded):  # the model must call a tool in each turn
        asyncio.run(run())
    assert len(looked) == 3 and set(looked) <= {"Mark", "Luke"}


def test_smolagents(server: Any) -> None:
    smolagents = pytest.importorskip("smolagents")
    from smolagents.agents import EMPTY_PROMPT_TEMPLATES

    class Search(smolagents.Tool):
        name = "search"
        description = "Search a book of the scriptures."
        inputs = {"book": {"type": "string", "description": "its name", "enum": ["Mark", "Luke"]}}  # noqa: RUF012
        output_type = "string"

        def forward(self, book: str) -> str:
            return f"{book} has nothing about it."

    prompts = EMPTY_PROMPT_TEMPLATES | {
        "system_prompt": "Call a tool.",  # the framework's own is longer than the small model's context
        "final_answer": {"pre_messages": "Answer.", "post_messages": "{{task}}"},
    }
    model = smolagents.OpenAIServerModel(
        model_id=server.model,
        api_base=f"{server.address}/v1",
        api_key="none",
        max_tokens=100,
        parallel_tool_calls=False,
    )
    agent = smolagents.ToolCallingAgent(
        tools=[Search()], model=model, prompt_templates=prompts, max_steps=3, verbosity_level=0
    )
    assert agent.run(TASK) is not None  # a refused request would raise
    steps = [step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)]
    calls = [call for step in steps for call in step.tool_calls or ()]
    assert steps and {call.name for call in calls} <= {"search", "final_answer"}
