"""Imports at startup: unused packages are not imported, and every import of transformers registers the format."""

from __future__ import annotations

import importlib
import importlib.abc
import inspect
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import warm

import torch_mesh
from torch_mesh.cli import COMMANDS, main
from torch_mesh.hf.import_hooks import AfterImport


def _run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_neither_torch_nor_other_slow_packages(option: str) -> None:
    code = """
import sys
from torch_mesh.cli import main
try:
    main(sys.argv[1:])
except SystemExit as end:
    assert end.code == 0
print("slow:", *{"torch", "transformers", "numpy", "huggingface_hub", "rich", "torch_mesh._C"} & set(sys.modules))
"""
    output = _run(code, option)
    assert output.endswith("slow:\n")
    words = " ".join(output.split())
    assert option == "--version" or all(f" {name} {about}" in words for name, about in COMMANDS.items())


def test_help_and_wrong_usage_of_commands_import_neither_torch_nor_transformers() -> None:
    code = """
import sys
from torch_mesh.cli import COMMANDS, main
from torch_mesh.cli.routing import COMMANDS as OF_ROUTING
for given in [*([name] for name in COMMANDS), *(["routing", name] for name in OF_ROUTING)]:
    for option, status in ("--help", 0), ("--no-such-option", 2):
        try:
            main([*given, option])
        except SystemExit as end:
            assert end.code == status
        else:
            raise AssertionError(given)
print("slow:", *{"torch", "transformers", "torch_mesh._C"} & set(sys.modules))
"""
    assert _run(code).endswith("slow:\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    output = capsys.readouterr().out
    assert end.value.code == 0 and f"torch-mesh {command}" in output
    assert len(output.split("\n\n")) > 2  # usage, description, options


def test_importing_the_package_registers_ops_and_imports_no_transformers() -> None:
    code = """
import sys, torch, torch_mesh
assert torch.ops.torch_mesh.experts and "transformers" not in sys.modules and "numpy" not in set(sys.modules) - before
from torch_mesh import MeshError, __version__
assert "transformers" not in sys.modules and "patch" in dir(torch_mesh)
try:
    torch_mesh.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
assert torch_mesh.validators.parse_size  # a module that has not been imported
"""
    _run("import sys, torch; before = set(sys.modules)\n" + code.replace("import sys, torch, ", "import "))


def test_cache_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    code = """
import os, sys
os.environ["XDG_CACHE_HOME"] = sys.argv[1]
from torch_mesh.cli import main
main(["cache", "ls"])
print("slow:", *{"torch", "transformers", "torch_mesh._C"} & set(sys.modules))
"""
    assert _run(code, str(tmp_path)).endswith("slow:\n")


def test_a_command_that_imports_no_torch_has_the_extension() -> None:
    output = _run(
        "import sys; from torch_mesh.store.manifest import block_checksum; assert 'torch' not in sys.modules; "
        "print(block_checksum(bytes(16), 'config.json', 0, b'{}'))"
    )
    assert len(bytes.fromhex(output.strip())) == 8


_WITHOUT_EXTENSION = """
import sys

class Refuses:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torch_mesh._C":
            raise {error}

sys.meta_path.insert(0, Refuses)
import torch_mesh
from torch_mesh.cli import main
"""


@pytest.mark.parametrize(
    "error", ["ImportError('no such symbol')", pytest.param("OSError('no such symbol')", marks=pytest.mark.slow)]
)
def test_an_extension_that_does_not_load_is_reported_and_leaves_torch_usable(error: str) -> None:
    code = """
assert main(["merge", "here", "adapter", "there"]) == 1
assert main(["--debug", "plan", "here"]) == 1
assert main(["cache", "ls"]) == 0
import torch
assert torch.ones(2).sum() == 2
try:
    torch_mesh.patch
except ImportError as error:
    assert "no such symbol" in str(error) and "pip install" in str(error)
else:
    raise AssertionError
import torch_mesh.cli.doctor_checks
"""
    command = [sys.executable, "-c", _WITHOUT_EXTENSION.format(error=error) + code]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    first = done.stderr.splitlines()[0]
    assert first.startswith("torch-mesh: torch_mesh's extension does not load with torch") and "no such symbol" in first
    assert "Traceback" in done.stderr  # from the command with --debug


def test_a_source_folder_says_that_it_shadows_the_installed_package(tmp_path: Path) -> None:
    """Python puts its start folder first on the path. In a checkout that folder has the sources without extensions."""
    package = Path(torch_mesh.__file__).parent
    shutil.copytree(package, tmp_path / "torch_mesh", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    (tmp_path / "setup.py").touch()
    # The finder of an editable install would also find its extension.
    code = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder)]
import torch_mesh
for name in ("patch", "_C"):
    try:
        getattr(torch_mesh, name)
    except ImportError as error:
        print(error)
from torch_mesh.cli import main
assert main(["plan", "here"]) == 1
try:
    from torch_mesh import _testing
except ImportError as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    environment = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # the module that it loads needs that finder
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=1200, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    message = f"{tmp_path / 'torch_mesh'} is torch_mesh's source folder, and has no extension"
    assert len(lines) == 3 and all(
        line.startswith(message) for line in (*lines[:2], done.stderr[len("torch-mesh: ") :])
    )
    assert f"pip install -e {tmp_path}" in lines[0] and "another folder" in lines[0]
    assert "not part of a wheel" in lines[2] and "pip install -e ." in lines[2]


def test_python_runs_the_command_as_a_module() -> None:
    command = [sys.executable, "-m", "torch_mesh", "--version"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert (done.returncode, done.stdout) == (0, f"torch-mesh {torch_mesh.__version__}\n")


def test_ctrl_c_during_the_import_of_a_command_exits_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    assert main(["inspect", "--verify", "here"]) == 130
    assert capsys.readouterr().err == "torch-mesh: interrupted\n"


def test_every_public_name_is_defined() -> None:
    assert all(getattr(torch_mesh, name) is not None for name in torch_mesh.__all__)
    assert set(torch_mesh.__all__) <= set(dir(torch_mesh))


# Imports each module that the arguments name, in a fork of a process that has imported torch_mesh and the other
# packages' modules that they need: the fork then executes those of transformers alone.
_REGISTERS = """
import importlib, os, sys, torch, torch_mesh, traceback

def other_modules(names):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            for name in names:
                try:
                    importlib.import_module(name)
                except Exception:  # reported below
                    pass
            with open(writing, "w") as pipe:
                pipe.write(" ".join(sys.modules))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        modules = pipe.read().split()
    os.waitpid(child, 0)
    awaited = ("transformers", "peft", "torch_mesh", "__main__")
    return [name for name in modules if name.partition(".")[0] not in awaited]

for name in other_modules(sys.argv[1:]):
    try:
        importlib.import_module(name)
    except Exception:
        pass
    assert not {"transformers", "peft"} & set(sys.modules), name
for name in sys.argv[1:]:
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, name
        continue
    status = 1
    try:
        try:
            importlib.import_module(name)
        except (ImportError, OSError, AttributeError, KeyError, RuntimeError) as error:  # a package is missing
            if name.partition(".")[0] == "torch_mesh":
                raise
            print(name, repr(error)[:200], flush=True)
        awaited = {"transformers.quantizers.auto", "transformers.modeling_utils", "transformers.integrations.gguf"}
        if awaited & set(sys.modules):
            from transformers import modeling_utils, quantizers
            assert "mesh" in quantizers.auto.AUTO_QUANTIZER_MAPPING
            assert "mesh" in quantizers.auto.AUTO_QUANTIZATION_CONFIG_MAPPING
            assert hasattr(modeling_utils.get_hf_quantizer, "__wrapped__")
            watchers = [each for each in sys.meta_path if type(each).__name__ == "AfterImport"]
            assert watchers and all(each._done for each in watchers if "transformers" in each._packages)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
"""


@pytest.mark.thorough
def test_some_imports_of_transformers_register_the_format() -> None:
    _run(_REGISTERS, "transformers.integrations.gguf", "torch_mesh.hf.saving")


@pytest.mark.slow
def test_the_import_of_any_module_of_transformers_registers_the_format() -> None:
    import transformers

    root = Path(transformers.__file__).parent
    paths = [path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("*.py")]
    left_out = ("models", "data", "kernels", "pipelines", "cli")
    names = {".".join(parts).removesuffix(".__init__") for parts in paths if parts[1] not in left_out}
    _run(_REGISTERS, *sorted(names), "transformers.models.auto.modeling_auto", "transformers.pipelines", "peft")


# Functions that a program has registered or replaced before it imports torch_mesh stay in use.
_LEAVES_ALONE = """
import sys
import torch, transformers
from peft.tuners.lora.model import LoraModel
from peft.utils import hotswap
from transformers import AttentionInterface, modeling_utils
from transformers.quantizers.auto import AutoHfQuantizer

def standing():
    return {
        "sdpa": AttentionInterface()["sdpa"],
        "save": modeling_utils.safe_save_file,
        "revert": modeling_utils.revert_weight_conversion,
        "adapters": LoraModel._create_new_module,
        "merges": LoraModel._check_merge_allowed,
        "hotswap": hotswap.hotswap_adapter_from_state_dict,
    }

calls = []

class Own(AutoHfQuantizer):
    pass

def counted(name, function):
    def call(*args, **kwargs):
        calls.append(name)
        return function(*args, **kwargs)
    return call

def merged(cls, *args):
    calls.append((cls.__name__, "merge", args))
    return "merged"

AttentionInterface.register("sdpa", counted("sdpa", AttentionInterface()["sdpa"]))
modeling_utils.safe_save_file = counted("save", modeling_utils.safe_save_file)
modeling_utils.get_hf_quantizer = counted("quantizer", modeling_utils.get_hf_quantizer)
AutoHfQuantizer.merge_quantization_configs = classmethod(merged)
before = standing()
import torch_mesh
torch_mesh.MeshConfig(resident=0.5), torch_mesh.patch, torch_mesh.merge, torch_mesh.speculate
assert standing() == before, [name for name, each in standing().items() if each is not before[name]]
stored = {"quant_method": "gptq"}
assert Own.merge_quantization_configs(stored, None) == "merged" and calls == [("Own", "merge", (stored, None))]
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
torch_mesh.patch(model, resident=0.5, attention="mesh")
model.save_pretrained(sys.argv[2] + "/patched")
changed = standing()
assert [name for name in changed if changed[name] is before[name]] == [], changed
del calls[:]
plain = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
plain(torch.arange(4)[None])
plain.save_pretrained(sys.argv[2] + "/plain")
assert set(calls) == {"quantizer", "sdpa", "save"}, calls
"""


def test_an_import_replaces_nothing_and_keeps_what_was_registered_before(mesh_tiny: Path, tmp_path: Path) -> None:
    done = warm.run(_LEAVES_ALONE, mesh_tiny, tmp_path)
    assert done.returncode == 0, done.stderr


_OPENS_KIMI = """
import builtins, sys
{imports}

def asked(*_):
    raise AssertionError("asks whether to run the checkpoint's code")

builtins.input = asked
for trusts in {{}}, {{"trust_remote_code": True}}:
    config = AutoConfig.from_pretrained(sys.argv[1], **trusts)
    assert config.model_type == "deepseek_v3" and not hasattr(config, "auto_map"), config
assert "torch_mesh.patching.quantizer" not in sys.modules
"""


_IMPORTS_IN_ORDER = ("import torch_mesh", "from transformers import AutoConfig")


@pytest.mark.parametrize("imports", [_IMPORTS_IN_ORDER, _IMPORTS_IN_ORDER[::-1]])
def test_the_first_model_of_a_program_may_have_an_unknown_type(imports: tuple[str, ...], tmp_path: Path) -> None:
    """Before any module is imported that registers the format."""
    code = {"AutoConfig": "configuration_deepseek.C"}
    table = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": code}
    (tmp_path / "config.json").write_text(json.dumps(table))
    (tmp_path / "configuration_deepseek.py").write_text("raise AssertionError")
    _run(_OPENS_KIMI.format(imports="\n".join(imports)), str(tmp_path))


MakePackage = Callable[..., str]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> Iterator[MakePackage]:
    """Creates a package of modules with the given code under a unique name."""
    name = f"made_up_{seed}"
    watching = list(sys.meta_path)

    def make(**modules: str) -> str:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
        for module, code in modules.items():
            (tmp_path / name / f"{module}.py").write_text(code)
        importlib.invalidate_caches()
        return name

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    sys.meta_path[:] = watching
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[module]


def test_the_action_runs_once_and_not_during_an_import(package: MakePackage) -> None:
    name = package(outer="from . import awaited, other\nwhole = True", awaited="", other="")
    seen = []

    def act() -> None:
        outer = sys.modules.get(f"{name}.outer")
        seen.append(outer is None or hasattr(outer, "whole"))
        importlib.import_module(f"{name}.other")

    watch = AfterImport([f"{name}.awaited"], [name], act)
    watch.watch()
    importlib.import_module(name)
    assert seen == [] and watch in sys.meta_path
    importlib.import_module(f"{name}.outer")
    assert seen == [True]
    # It stays in sys.meta_path, which another thread may be iterating, and finds nothing more.
    path = sys.modules[name].__path__
    assert watch in sys.meta_path and watch.find_spec(f"{name}.other", path) is None


def test_the_action_waits_for_an_import_of_another_thread(package: MakePackage) -> None:
    name = package(
        awaited="""
import sys
go_on, begun = sys.modules[__package__].go_on, sys.modules[__package__].begun
begun.set()
assert go_on.wait(60)
whole = True
""",
        other="",
    )
    parent: Any = importlib.import_module(name)
    parent.go_on, parent.begun = threading.Event(), threading.Event()
    seen = []
    thread = threading.Thread(target=importlib.import_module, args=[f"{name}.awaited"])
    thread.start()
    try:
        assert parent.begun.wait(60)
        # The import has begun, so the watcher cannot see it end.
        watch = AfterImport(
            [f"{name}.awaited"], [name], lambda: seen.append(hasattr(sys.modules[f"{name}.awaited"], "whole"))
        )
        watch.watch()
        importlib.import_module(f"{name}.other")
        assert seen == []
    finally:
        parent.go_on.set()
        thread.join()
    watch.act_if_due()
    assert seen == [True]


def test_any_finder_and_a_loader_shared_by_modules_work(package: MakePackage, monkeypatch: pytest.MonkeyPatch) -> None:
    name = package(awaited="")
    executed: list[str] = []

    class Shared(importlib.abc.Loader):
        def exec_module(self, module: ModuleType) -> None:
            executed.append(module.__name__)
            assert len(inspect.stack(0)) < depth + 20

    shared, depth = Shared(), len(inspect.stack(0))

    class Finder:
        @staticmethod
        def find_spec(module: str, path: Any, target: Any) -> ModuleSpec | None:
            return ModuleSpec(module, shared) if "made_here" in module else None

    sys.meta_path[:0] = [object(), Finder]  # type: ignore[list-item]  # the first is no finder
    for _ in range(2):
        AfterImport([f"{name}.awaited"], [name], lambda: None).watch()
    made = [f"{name}.made_here_{which}" for which in range(30)]
    for each in made:
        importlib.import_module(each)
    assert executed == made


def test_the_action_runs_at_once_if_the_module_is_imported(package: MakePackage) -> None:
    name = package(awaited="")
    importlib.import_module(f"{name}.awaited")
    seen: list[int] = []
    AfterImport([f"{name}.awaited"], [name], lambda: seen.append(1)).watch()
    assert seen == [1]


def test_a_failed_action_raises_and_is_retried(package: MakePackage) -> None:
    name = package(awaited="", another="")
    attempts = []

    def act() -> None:
        attempts.append(1)
        if len(attempts) == 1:
            raise RuntimeError("not yet")

    AfterImport([f"{name}.awaited"], [name], act).watch()
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module(f"{name}.awaited")
    importlib.import_module(f"{name}.awaited")
    importlib.import_module(f"{name}.another")
    assert len(attempts) == 2
    assert Path(importlib.util.find_spec(f"{name}.another").origin).name == "another.py"  # type: ignore[union-attr,arg-type]
