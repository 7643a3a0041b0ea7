"""What has to be done once another package is there, without importing it for that.

torch_mesh registers ops with torch and a quantiser with transformers. Whoever never imports those should not wait for them, and whoever imports
them after torch_mesh must find it registered all the same.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class AfterImport(MetaPathFinder):
    """Calls ``act`` once, when a module among ``awaited`` has been imported and no module of ``packages`` is half imported in that thread.

    The second is why this is not simply called at the end of an awaited module: what ``act`` imports may need the module that is only
    about to get its names from it, of transformers or of torch_mesh itself. If ``act`` raises, whoever imports sees it, and the next
    import tries again.
    """

    def __init__(self, awaited: Sequence[str], packages: Sequence[str], act: Callable[[], None]) -> None:
        self._awaited, self._packages, self._act = awaited, packages, act
        self._under_way = threading.local()
        self._done = False

    def watch(self) -> None:
        """From now on; what has been imported already counts."""
        sys.meta_path.insert(0, self)
        self._act_if_due()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self._packages:
            return None
        # Those behind this one, others of this class among them, which wrap the same module too.
        finders = list(sys.meta_path)
        behind = finders[finders.index(self) + 1 :] if self in finders else finders  # this one may just have ended
        found = (finder.find_spec(name, path, target) for finder in behind)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            self._wrap(spec)
        return spec

    def _wrap(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def execute_and_look(module: ModuleType) -> None:
            self._under_way.depth = getattr(self._under_way, "depth", 0) + 1
            try:
                execute(module)
            finally:
                self._under_way.depth -= 1
            self._act_if_due()

        # On this one object, which is made for this one module: its class, and so what it says of its source, stays.
        loader.exec_module = execute_and_look  # type: ignore[method-assign]

    def _act_if_due(self) -> None:
        if (
            self._done
            or getattr(self._under_way, "depth", 0) > 0
            or not any(name in sys.modules for name in self._awaited)
        ):
            return
        self._done = True  # what is imported now asks again
        try:
            self._act()
        except BaseException:
            self._done = False
            raise
        if self in sys.meta_path:
            sys.meta_path.remove(self)
