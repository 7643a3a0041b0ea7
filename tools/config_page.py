"""Writes docs/config.md, the reference of MeshConfig's fields, from torch_mesh/config_fields.py."""

import inspect
import re
from pathlib import Path

from torch_mesh.config_fields import FIELDS, GROUPS
from torch_mesh.validators import shown

PAGE = Path(__file__).parents[1] / "docs" / "config.md"
_HEAD = """\
# MeshConfig
This page lists every field of `MeshConfig`, the configuration of `from_pretrained` and `torch_mesh.patch`:
```python
import torch_mesh

config = torch_mesh.MeshConfig(resident="8GiB", gpu={"experts": 8})
config.resident, config.gpu.experts
```
Give the fields of a group as a mapping, and read them as attributes. Arguments override the environment, which
overrides the checkpoint's config, which overrides the default. A checkpoint's config.json may set the fields marked
"may set it"; any other field there warns and is ignored, since it depends on the machine. In config.json and in the
options of `torch-mesh` a group's field has the name of its variable: `early_experts`, `--gpu-experts 8`.

Fields "for measuring" (`policy`, `prefill`, `threads`, `attention`) are for comparisons, tests and benchmarks. Leave
them at their defaults otherwise.
"""
_TAIL = """
<!-- `python tools/config_page.py` writes this page from `torch_mesh/config_fields.py`; a test compares them. -->
"""


def page() -> str:
    """The text of docs/config.md."""
    parts = [_HEAD]
    for name in [None, *GROUPS]:
        if name is not None:
            about = re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", inspect.getdoc(GROUPS[name].kind) or "")
            parts.append(f"\n## {name}\n{about}\n")
        parts.append("\n| field | values | default | environment | checkpoint | meaning |\n|---|---|---|---|---|---|\n")
        for field in FIELDS.values():
            if field.group == name:
                cells = [f"`{field.name}`", field.values.words, shown(field.default), f"`{field.variable}`"]
                cells += ["may set it" if field.of_checkpoint else "–", field.sentence]
                parts.append(f"| {' | '.join(cells)} |\n")
    return "".join([*parts, _TAIL])


if __name__ == "__main__":
    PAGE.write_text(page())
