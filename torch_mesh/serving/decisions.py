"""Typed decisions with probabilities (/v1/systemone), by transformers' DecisionPipeline (from 5.24 on)."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

from torch_mesh.serving.errors import RequestError, RequestTooLongError
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
        self._service, self._file = service, config

    @functools.cached_property
    def _config(self) -> Any:
        """Raises RequestError for a config with an adapter: the pipeline would load it for all requests."""
        from transformers.decision import DecisionConfig

        model = self._service.model
        if self._file is not None:
            config = DecisionConfig.from_file(self._file)
        else:  # a decision model has its own
            config = getattr(model, "decision_config", None) or DecisionConfig.from_pretrained(model.name_or_path)
        if config.adapter:
            raise RequestError(
                f"The decision config of {self._service.served} has the adapter {config.adapter!r}, which would change "
                "all other answers too: serve a checkpoint with the adapter merged (torch-mesh merge)."
            )
        return config

    def _pipeline(self) -> Any:
        """A new pipeline, which leaves the model as it is. Kept, it would keep the model of a stopped server."""
        from transformers import ProcessorMixin
        from transformers.pipelines import DecisionPipeline

        prompts, model = self._service.prompts, self._service.model
        return DecisionPipeline(
            model=model,
            # Without a device it moves the model to the first GPU. It takes none for a model over several.
            device=model.device if getattr(model, "hf_device_map", None) is None else None,
            tokenizer=prompts.tokenizer,
            processor=prompts.processor if isinstance(prompts.processor, ProcessorMixin) else None,
            decision_config=self._config,
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
        """Answer a request. Raises RequestError for one that the pipeline does not accept or that does not fit."""
        given = await asyncio.to_thread(checked_request, DECISIONS, body, self._service.served, 0)
        request = given | {"assets": {name: self._asset(asset) for name, asset in given.get("assets", {}).items()}}

        def compute() -> dict[str, Any]:
            pipeline = self._pipeline()
            inputs = pipeline.preprocess(request)
            prompts = [each["input_ids"][0] for each, _ in inputs["prompts"]]  # computed one after the other
            with self._service.engine.kept.room(max(prompts, key=len).to(pipeline.device)):
                answers = pipeline.postprocess(pipeline.forward(inputs))
            usage = {"input_tokens": sum(map(len, prompts)), "output_tokens": 0}
            return {"model": self._service.served, "answers": answers, "usage": usage}

        try:
            made: dict[str, Any] = await self._service.engine.run(compute)
        except RequestTooLongError as error:
            error.param = "state"
            raise
        except ValueError as error:  # labels of several tokens, questions of an unknown kind
            raise RequestError(f"These questions cannot be asked: {error}", "questions") from error
        return made
