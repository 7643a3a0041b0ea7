"""Name, open and describe the model of ``torch-mesh serve``."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from torch_mesh.config import MeshConfig
from torch_mesh.hf.open_model import load_tokenizer
from torch_mesh.serving.prompts import NO_TEMPLATE, Prompts, check_template_arguments, template_of
from torch_mesh.store.gguf import is_gguf
from torch_mesh.store.header import store_error
from torch_mesh.store.hub import check_model, local_folder
from torch_mesh.store.weight_files import check_folder

# A model of the hub is owner/model, with @revision. A GGUF file of it follows a colon or, as in the rest of torch_mesh,
# a slash.
_ON_HUB = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?P<repo>[^:@]+)(?P<revision>@[^:@]+)?:(?P<file>[^:]+(?i:\.gguf))",
        r"(?P<repo>[^/:@]+/[^/:@]+)(?P<revision>@[^/:@]+)?/(?P<file>[^:]+(?i:\.gguf))",
        r"(?P<repo>[^:@]+)(?P<revision>@[^:@]+)?",
    )
)


@dataclass(frozen=True)
class Source:
    """Where a model is. ``name``: the model's name for clients."""

    name: str
    folder: str
    revision: str | None = None
    file: str | None = None


def source_of(model: str) -> Source:
    """Raises ValueError for an invalid name, StoreError for a path that does not exist."""
    if os.path.lexists(model) or model.startswith(("/", "./", "../", "~")):
        if not is_gguf(model):
            check_folder(model)
        elif not os.path.isfile(model):
            raise store_error(model, "there is no such file")
        folder, file = os.path.split(model) if is_gguf(model) else (model, None)
        return Source(model, folder or ".", None, file)
    found = next((match for pattern in _ON_HUB if (match := pattern.fullmatch(model))), None)
    try:
        if found is None or is_gguf(found["repo"]):
            raise HFValidationError
        validate_repo_id(found["repo"])
    except HFValidationError:
        raise ValueError(
            f"{model}: there is no such file or folder, and a model of the hub is named owner/model, "
            "owner/model@revision, owner/model/file.gguf or owner/model@revision/folder/file.gguf"
        ) from None
    parts = found.groupdict()
    repo, revision, file = parts["repo"], parts["revision"] or "", parts.get("file")
    return Source(f"{repo}{revision}" + (f":{file}" if file else ""), repo, revision[1:] or None, file)


def open_for_serving(
    source: Source, config: MeshConfig, options: Mapping[str, Any], must_chat: bool = False
) -> tuple[Any, Prompts]:
    """Open a model, in evaluation mode, and its prompts.

    Args:
        options: those of ``complete_options``.
        must_chat: raise for a model without a chat template.

    Raises ValueError for a missing template or variables that it does not read, and what ``from_pretrained`` raises.
    """
    processor = open_processor(source, options["trust_remote_code"])
    template = template_of(processor)
    if must_chat and not template:
        raise ValueError(f"{source.name} {NO_TEMPLATE}")
    check_template_arguments(template, options)
    model = open_served(source, config, options)
    return model, Prompts(source.name, processor, model, options["arguments"], options["fetch_media"])


def open_processor(source: Source, trust_remote_code: bool) -> Any:
    """Open the tokenizer, or the processor of a model for pictures and sound.

    Raises ``HubError`` at once for a model that cannot be had, and ``MeshError`` if transformers cannot load it.
    """
    from transformers import AutoProcessor, AutoTokenizer

    check_source(source)
    kind = AutoProcessor if source.file is None else AutoTokenizer
    arguments = {**_location(source), "trust_remote_code": trust_remote_code}
    return load_tokenizer(kind.from_pretrained, _folder_of(source), **arguments)


def check_source(source: Source) -> None:
    """Raises ``HubError`` for a model of the hub that cannot be had. GGUF files are checked when they are located."""
    if source.file is None and not os.path.isdir(source.folder):
        check_model(source.folder, revision=source.revision)


def open_served(source: Source, config: MeshConfig, given: Mapping[str, Any]) -> Any:
    """Open the model, in evaluation mode.

    Args:
        given: ``device``, ``dtype``, ``attn_implementation`` and ``trust_remote_code``, of ``from_pretrained``.

    Raises what ``from_pretrained`` raises.
    """
    folder, location = _folder_of(source), {**_location(source), "trust_remote_code": given["trust_remote_code"]}
    about = config_of(source, given)
    dtype, device = given["dtype"], given["device"]
    model = _class_of(about).from_pretrained(
        folder,
        **location,
        quantization_config=config,
        attn_implementation=given["attn_implementation"],
        dtype=dtype if dtype == "auto" else getattr(torch, dtype),
        device_map=int(device) if device.isdigit() else device,
    )
    return model.eval()


def config_of(source: Source, given: Mapping[str, Any]) -> Any:
    """The config of transformers. ``given``: ``trust_remote_code``. Raises what ``from_pretrained`` raises."""
    from transformers import AutoConfig

    location = {**_location(source), "trust_remote_code": given["trust_remote_code"]}
    return AutoConfig.from_pretrained(_folder_of(source), **location)


def _location(source: Source) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained`` for the location: the GGUF file, or the revision."""
    if source.file is not None:
        return {"gguf_file": source.file}
    return {"revision": source.revision} if source.revision else {}


def _folder_of(source: Source) -> str:
    """For a GGUF file of the hub, the folder that it was downloaded to: transformers would look for another
    revision."""
    if source.file is None or os.path.isdir(source.folder):
        return source.folder
    path = os.fspath(local_folder(f"{source.folder}/{source.file}", revision=source.revision))
    return path.removesuffix(f"/{source.file}")


def _class_of(config: Any) -> Any:
    """The model class that the checkpoint names, unless it brings its own code. transformers may know some only by
    model type."""
    import transformers
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

    if config.model_type in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES:
        return transformers.AutoModelForMultimodalLM
    names = getattr(config, "architectures", None) or ()
    return next((found for name in names if (found := getattr(transformers, name, None))), AutoModelForCausalLM)
