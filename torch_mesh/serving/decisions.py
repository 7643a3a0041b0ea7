"""Typed decisions with probabilities (/v1/systemone), by transformers' DecisionPipeline (from 5.24 on)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_mesh.serving.errors import RequestError
from torch_mesh.serving.requests import DECISIONS, TEXT, check, checked_request
from torch_mesh.serving.service import Service


def is_available() -> bool:
    try:
        from transformers.pipelines import DecisionPipeline  # noqa: F401
    except ImportError:
        return False
    return True


class Decisions:
    """Answers decision requests of one model.

    Args:
        config: path of a decision config. None: the checkpoint's own.
    """

    def __init__(self, service: Service, config: str | None) -> None:
        self._service, self._config = service, config

    def _pipeline(self) -> Any:
        from transformers import ProcessorMixin
        from transformers.decision import DecisionConfig
        from transformers.pipelines import DecisionPipeline

        prompts = self._service.prompts
        return DecisionPipeline(
            model=self._service.model,
            tokenizer=prompts.tokenizer,
            processor=prompts.processor if isinstance(prompts.processor, ProcessorMixin) else None,
            decision_config=None if self._config is None else DecisionConfig.from_file(self._config),
        )

    def _asset(self, given: Any) -> str:
        """The address of a picture. Raises RequestError for one that is not to be opened."""
        if isinstance(given, dict):
            data = given.get("data_base64")
            check("assets.data_base64", data, TEXT, "assets")
            return f"data:image/png;base64,{data}"  # the data say what format it is
        check("assets", given, TEXT, "assets")
        self._service.prompts.check_address("image_url", given, "assets")
        return str(given)

    async def answer(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Answer a request. Raises RequestError for a request that the pipeline does not accept."""
        given = checked_request(DECISIONS, body, self._service.served, 0)
        request = given | {"assets": {name: self._asset(asset) for name, asset in given.get("assets", {}).items()}}

        def compute() -> dict[str, Any]:
            pipeline = self._pipeline()
            inputs = pipeline.preprocess(request)
            answers = pipeline.postprocess(pipeline.forward(inputs))
            tokens = sum(each["input_ids"].shape[-1] for each, _ in inputs["prompts"])
            usage = {"input_tokens": tokens, "output_tokens": 0}
            return {"model": self._service.served, "answers": answers, "usage": usage}

        try:
            made: dict[str, Any] = await self._service.engine.run(compute)
        except ValueError as error:  # labels of several tokens, questions of an unknown kind
            raise RequestError(f"These questions cannot be asked: {error}", "questions") from error
        return made
