"""Act when another package is imported, without importing it.

A program that never imports torch or transformers need not wait for them; one that does finds torch_mesh registered.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Calls ``act`` once, when a module among ``awaited`` has been imported and this thread is importing no module of
    ``packages``.

    With ``in_progress`` modules of ``packages`` whose import had begun before ``watch`` are waited for too, as when
    transformers imports torch.

    The imports of ``act`` may need modules of transformers or torch_mesh that are still partially initialized, hence
    the second condition. If ``act`` raises, the importer sees the error and the next import tries again. The finder
    stays in place afterwards, since removing it could make another thread skip one.
    """

    def __init__(self, awaited: Sequence[str], packages: Sequence[str], act: Callable[[], None]) -> None:
        self._awaited, self._packages, self._act = awaited, packages, act
        self._under_way = threading.local()
        self._done = False
        self._begun: list[ModuleType] = []

    def watch(self, in_progress: bool = False) -> None:
        """Start watching; modules that are already imported count."""
        if in_progress:
            modules = list(sys.modules.items())
            self._begun = [
                module for name, module in modules if name.partition(".")[0] in self._packages and _is_begun(module)
            ]
        sys.meta_path.insert(0, self)
        self.act_if_due()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._begun:
            self.act_if_due()
        if self._done or name.partition(".")[0] not in self._packages:
            return None
        # The finders behind this one, other instances of this class included, which may wrap the same module.
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :]
        found = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            self._wrap(spec)
        return spec

    def _wrap(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module
        watchers: tuple[AfterImport, ...] = getattr(execute, "watchers", ())
        if self in watchers:  # a loader may serve several modules, or one repeatedly
            return

        def execute_and_look(module: ModuleType) -> None:
            self._under_way.depth = getattr(self._under_way, "depth", 0) + 1
            try:
                execute(module)
            finally:
                self._under_way.depth -= 1
            self.act_if_due(module.__name__)

        execute_and_look.watchers = (*watchers, self)  # type: ignore[attr-defined]
        # On this one object: its class, and so its source lookup, stays.
        loader.exec_module = execute_and_look  # type: ignore[method-assign]

    def act_if_due(self, ended: str = "") -> None:
        """``ended``: a module that has finished executing, which the import system does not know yet."""
        if (
            self._done
            or getattr(self._under_way, "depth", 0) > 0
            or any(map(_is_begun, self._begun))
            or not any(name == ended or _is_imported(name) for name in self._awaited)
        ):
            return
        self._done = True  # the imports of ``act`` come back here
        try:
            self._act()
        except BaseException:
            self._done = False
            raise


def _is_imported(name: str) -> bool:
    """Whether the import is complete: modules that another thread is importing are in sys.modules too."""
    module = sys.modules.get(name)
    return module is not None and not _is_begun(module)


def _is_begun(module: ModuleType) -> bool:
    """Whether the module's import has begun and not ended."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
