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
    import tries again. It stays among the finders when it is done: another thread may be on its way through them, and would miss one.
    """

    def __init__(self, awaited: Sequence[str], packages: Sequence[str], act: Callable[[], None]) -> None:
        self._awaited, self._packages, self._act = awaited, packages, act
        self._under_way = threading.local()
        self._done = False

    def watch(self) -> None:
        """From now on; what has been imported already counts."""
        sys.meta_path.insert(0, self)
        self.act_if_due()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._done or name.partition(".")[0] not in self._packages:
            return None
        # Those behind this one, others of this class among them, which wrap the same module too.
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
        if self in watchers:  # a loader that gives out several modules, or one again
            return

        def execute_and_look(module: ModuleType) -> None:
            self._under_way.depth = getattr(self._under_way, "depth", 0) + 1
            try:
                execute(module)
            finally:
                self._under_way.depth -= 1
            self.act_if_due(module.__name__)

        execute_and_look.watchers = (*watchers, self)  # type: ignore[attr-defined]
        # On this one object: its class, and so what it says of its source, stays.
        loader.exec_module = execute_and_look  # type: ignore[method-assign]

    def act_if_due(self, ended: str = "") -> None:
        """``ended``: a module that has run to its end, though the import system does not know that yet."""
        if (
            self._done
            or getattr(self._under_way, "depth", 0) > 0
            or not any(name == ended or _is_imported(name) for name in self._awaited)
        ):
            return
        self._done = True  # what is imported now asks again
        try:
            self._act()
        except BaseException:
            self._done = False
            raise


def _is_imported(name: str) -> bool:
    """Whole: what another thread is importing is among the modules as well."""
    module = sys.modules.get(name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)
