"""Builds torch_mesh._C with ninja: one object per source, each with its own instruction set, never the build machine's.

A build in place or for an editable install makes torch_mesh._testing too, which tests and benchmarks need: a wheel is
what ships. A wheel is for the minor version of torch that it was built against, and says so in its version and its
requirements.

``python setup.py engine_tests [--sanitize thread|address]`` builds the torch-free engine with its GoogleTest suite and
prints the path of the program. ``python setup.py engine_objects`` compiles what the extension links of the engine, for
which torch need not be installed yet.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512cd"]
VNNI = [*AVX512, "-mavx512vnni"]
INSTRUCTION_SETS = {
    "csrc/kernels/avx2.cpp": AVX2,
    "csrc/kernels/avx_vnni.cpp": [*AVX2, "-mavxvnni"],
    "csrc/kernels/avx512.cpp": AVX512,
    "csrc/kernels/avx512_vnni.cpp": VNNI,
    "csrc/kernels/avx512_bf16.cpp": [*VNNI, "-mavx512bf16"],
    "csrc/kernels/amx.cpp": [*VNNI, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"],
    # The VNNI and BF16 bodies over emulated instructions, so that they run where the processor lacks those.
    "tests/engine/emulated_avx_vnni.cpp": AVX2,
    "tests/engine/emulated_vnni.cpp": AVX512,
}
COMMON = ["-std=c++20", "-Wall", "-Wextra", "-fvisibility=hidden", f"-I{CSRC}"]


def flags_of(source: Path) -> list[str]:
    """Flags beyond the common ones. Kernels write their fused multiply-adds out, so that every table rounds alike."""
    name = source.relative_to(ROOT).as_posix()
    explicit_fma = name.startswith("csrc/kernels/") or name in INSTRUCTION_SETS
    contract = ["-ffp-contract=off"] if explicit_fma else []
    return contract + INSTRUCTION_SETS.get(name, [])


def sources(*rooms: str) -> list[Path]:
    return sorted(path for room in rooms for path in (CSRC / room).rglob("*.cpp"))


ENGINE_ROOMS = ("base", "store", "io", "tables", "residency", "kernels", "engine", "gpu")
# What each group of sources includes most: precompiled once a group. Sources include it as well, and compile without.
STANDARD_HEADERS = (
    *("algorithm", "array", "atomic", "chrono", "condition_variable", "deque", "functional", "map", "memory", "mutex"),
    *("optional", "span", "string", "thread", "unordered_map", "vector"),
)
TORCH_HEADERS = ("ATen/core/Tensor.h", "ATen/ops/empty.h", "torch/library.h")
TEST_HEADERS = ("gtest/gtest.h",)
TESTING_MODULE = CSRC / "testing" / "module.cpp"  # which needs torch
EXTENSIONS = ("torch_mesh._C", "torch_mesh._testing")


def testing_sources() -> list[Path]:
    """All files of csrc/testing except the module's."""
    return [source for source in sources("testing") if source != TESTING_MODULE]


def compiler() -> list[str]:
    """``CXX`` may have arguments, such as those of ccache."""
    given = os.environ.get("CXX")
    return shlex.split(given) if given else [shutil.which("g++") or "c++"]


@functools.cache
def is_cached() -> bool:
    """Whether the compiler is ccache, which finds nothing again that was compiled with a precompiled header in another
    folder."""
    return Path(os.path.realpath(shutil.which(compiler()[0]) or "")).name == "ccache"


def compiles(code: str, *flags: str) -> bool:
    command = [*compiler(), "-std=c++20", "-x", "c++", "-", "-o", os.devnull, *flags]
    return subprocess.run(command, input=code.encode(), capture_output=True, check=False).returncode == 0


def library(name: str, program: str) -> list[str]:
    """Link flags with which ``program`` becomes a shared library; none if it cannot. The archive goes first: a wheel
    then needs no such package."""
    flags = (f"-l:lib{name}.a", f"-l{name}")
    # Without text relocations: an archive that was compiled without -fPIC fails here.
    return next(([flag] for flag in flags if compiles(program, "-shared", "-fPIC", "-Wl,-z,text,-z,defs", flag)), [])


def liburing_flags() -> tuple[list[str], list[str]]:
    """Compile and link flags for liburing; empty, with a word on stderr, where it is not installed."""
    program = "#include <liburing.h>\nint main() { io_uring ring; return io_uring_queue_init(1, &ring, 0); }\n"
    if os.environ.get("TORCH_MESH_BUILD_URING", "1") != "0" and (link := library("uring", program)):
        return ["-DTORCH_MESH_WITH_URING"], link
    print("torch_mesh: building without liburing (package liburing-dev); reads will use threads", file=sys.stderr)
    return [], []


def xxhash_flags() -> tuple[list[str], list[str]]:
    """Compile and link flags for xxHash: its library, which chooses the instruction set when it runs, or else its
    header alone."""
    if not compiles("#include <xxhash.h>\nint main() {}\n"):
        raise SystemExit("torch_mesh: xxhash.h not found. Install libxxhash-dev (Debian) or put it on CPATH.")
    program = "#include <xxh_x86dispatch.h>\nint main() { return XXH3_64bits_dispatch(nullptr, 0) == 0; }\n"
    if link := library("xxhash", program):
        return ["-DTORCH_MESH_WITH_XXH_DISPATCH"], link
    print("torch_mesh: building with xxHash's header alone; checksums take twice the time", file=sys.stderr)
    return [], []


def shipped(link_flags: list[str]) -> NinjaFile:
    """The extension's own folder and flags: what tests of the engine link are the objects that it ships, compiled
    once."""
    # Not build_temp: an editable install gives a fresh one each time, and everything would compile again.
    folder = ROOT / "build" / f"extension-{sys.implementation.cache_tag}"
    features = [*uring_and_xxhash()[0]]
    build = NinjaFile(folder, [*COMMON, "-O3", "-g1", "-fPIC", *features], link_flags)
    compile_engine(build)
    return build


def compile_engine(build: NinjaFile) -> None:
    kernels = sources("kernels")
    build.compile(kernels)  # whose instruction sets a precompiled header would have to have, too
    build.compile(
        (path for path in sources(*ENGINE_ROOMS) if path not in kernels),
        headers=build.precompile("standard", STANDARD_HEADERS),
    )


@functools.cache
def uring_and_xxhash() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Compile and link flags for both."""
    (uring_compile, uring_link), (xxhash_compile, xxhash_link) = liburing_flags(), xxhash_flags()
    return (*uring_compile, *xxhash_compile), (*uring_link, *xxhash_link)


class NinjaFile:
    """The few lines of ninja that this build needs."""

    def __init__(self, folder: Path, compile_flags: list[str], link_flags: list[str]) -> None:
        self.folder = folder
        self.lines = [
            f"builddir = {_escape(folder)}",
            "rule compile",
            f"  command = {_words([*compiler(), *compile_flags])} $flags -MD -MF $out.d -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = compile $in",
            "rule precompile",
            f"  command = {_words([*compiler(), *compile_flags])} $flags -MD -MF $out.d -x c++-header -c $in -o $out",
            "  depfile = $out.d",
            "  deps = gcc",
            "  description = precompile $in",
            "rule link",
            f"  command = {_words(compiler())} $in -o $out {_words(link_flags)}",
            "  description = link $out",
        ]
        self.objects: list[str] = []

    def compile(self, paths: Iterable[Path], flags: Iterable[str] = (), headers: Path | None = None) -> None:
        """``headers`` from ``precompile`` with the same flags."""
        include = ["-include", str(headers)] if headers else []
        needs = f" | {_escape(precompiled(headers))}" if headers else ""
        for source in paths:
            target = self.folder / source.relative_to(ROOT).with_suffix(".o")
            self.lines.append(f"build {_escape(target)}: compile {_escape(source)}{needs}")
            self.lines.append(f"  flags = {_words([*include, *flags, *flags_of(source)])}")
            self.objects.append(_escape(target))

    def precompile(self, name: str, headers: Iterable[str], flags: Iterable[str] = ()) -> Path | None:
        """A header that includes ``headers``; None where that would compile more often than it saves."""
        if is_cached():
            return None
        path = self.folder / f"{name}.h"
        text = "".join(f"#include <{header}>\n" for header in headers)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:  # else all would compile again
            path.write_text(text)
        self.lines.append(f"build {_escape(precompiled(path))}: precompile {_escape(path)}")
        self.lines.append(f"  flags = {_words(flags)}")
        return path

    def link(self, target: Path) -> None:
        self.lines.append(f"build {_escape(target)}: link {' '.join(self.objects)}")
        target.parent.mkdir(parents=True, exist_ok=True)
        self.make(target.name, str(target))

    def make(self, name: str, *targets: str) -> None:
        """Build ``targets``, or all objects, from a ninja file of that name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        build = self.folder / f"{name}.ninja"
        build.write_text("\n".join(self.lines) + "\n")
        command = [_ninja(), "-f", str(build), *targets, *_jobs()]
        if subprocess.run(command, check=False, stdout=sys.stderr).returncode != 0:
            raise SystemExit("torch_mesh: the build failed; see the compiler's messages above")


def precompiled(header: Path) -> Path:
    """Where g++ and clang++ look when they are told to include the header first."""
    return header.with_name(f"{header.name}.gch")


def _words(words: Iterable[str]) -> str:
    """A part of a command, as the shell is to see it behind ninja."""
    return shlex.join(words).replace("$", "$$")


def _escape(path: Path) -> str:
    return str(path).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")


def _jobs() -> list[str]:
    jobs = os.environ.get("MAX_JOBS")
    return ["-j", jobs] if jobs else []


def _ninja() -> str:
    try:
        import ninja

        return str(Path(ninja.BIN_DIR) / "ninja")
    except ImportError:
        found = shutil.which("ninja")
        if found is None:
            raise SystemExit("torch_mesh: ninja not found. pip install ninja") from None
        return found


class BuildExtension(build_ext):
    """torch_mesh._C against the torch that is installed, and torch_mesh._testing unless it is for a wheel."""

    @property
    def is_developers(self) -> bool:
        return bool(self.inplace or self.editable_mode)

    def finalize_options(self) -> None:
        if self.is_developers:
            self.distribution.ext_modules = [Extension(name, sources=[]) for name in EXTENSIONS]
        super().finalize_options()

    def build_extension(self, ext: Extension) -> None:
        if torch_version() is None:
            raise SystemExit(
                "torch_mesh: install torch first, which it is built against. If it is installed, build with `pip "
                "install --no-build-isolation`, and "
                "the packages of build-system.requires in pyproject.toml beforehand"
            )
        import torch
        from torch.utils import cpp_extension

        includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        libraries = cpp_extension.library_paths()
        # torch's headers are not ours to warn about.
        torch_flags = [flag for path in includes for flag in ("-isystem", path)]
        # Without torch's own assertions, and without the declarations of operators that no source here calls.
        torch_flags += ["-DNDEBUG", "-DAT_PER_OPERATOR_HEADERS"]
        torch_flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", "-fopenmp"]
        link = ["-shared", "-fopenmp", "-ldl", *(f"-L{path}" for path in libraries)]
        # torch is imported first and its libraries with it. A wheel has them beside it, wherever it is installed.
        link += [f"-Wl,-rpath,{path}" for path in (libraries if self.is_developers else ["$ORIGIN/../torch/lib"])]
        link += ["-Wl,--exclude-libs,ALL"]  # symbols of static archives stay private
        link += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", *uring_and_xxhash()[1]]
        build = shipped(link)
        if ext.name == EXTENSIONS[0]:
            operators = [source for source in sources("bindings") if "<torch/library.h>" in source.read_text()]
            build.compile(operators, torch_flags, build.precompile("torch", TORCH_HEADERS, torch_flags))
            build.compile([source for source in sources("bindings") if source not in operators], torch_flags)
        else:
            build.compile(testing_sources())
            build.compile([TESTING_MODULE, CSRC / "bindings" / "runtime.cpp"], torch_flags)
        build.link(Path(self.get_ext_fullpath(ext.name)).resolve())


class EngineObjects(Command):
    description = "compile the engine's part of the extension, without torch"
    user_options: ClassVar = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        shipped([]).make("engine_objects")


class EngineTests(Command):
    description = "build the engine's GoogleTest suite, without torch"
    user_options: ClassVar = [("sanitize=", None, "thread or address")]

    def initialize_options(self) -> None:
        self.sanitize = ""

    def finalize_options(self) -> None:
        if self.sanitize not in ("", "thread", "address"):
            raise SystemExit(f"--sanitize is {self.sanitize!r}; allowed: thread, address")

    def run(self) -> None:
        includes = [f"-I{ROOT / 'tests' / 'engine'}"]
        compile_flags, link_flags = map(list, uring_and_xxhash())
        link = ["-pthread", "-lgtest", "-lgtest_main", "-ldl", *link_flags]
        if self.sanitize:
            folder = ROOT / "build" / f"engine-tests-{self.sanitize}"
            flags = {
                "thread": ["-fsanitize=thread"],
                # With checks for null g++ takes no address for a constant, as the tables of kernels need.
                "address": [
                    "-fsanitize=address,undefined",
                    "-fno-sanitize=null,nonnull-attribute,returns-nonnull-attribute",
                    "-fno-sanitize-recover=all",
                    "-D_GLIBCXX_ASSERTIONS",  # indices of spans and vectors within their memory
                ],
            }[self.sanitize]
            common = [*COMMON, *includes, "-O1", "-fno-omit-frame-pointer", "-g", "-pthread", *compile_flags, *flags]
            build = NinjaFile(folder, common, [*flags, *link])
            compile_engine(build)
            own = []
        else:
            folder = ROOT / "build" / "engine-tests"
            build = shipped(link)
            own = [*includes, "-O2", "-pthread"]
        build.compile(testing_sources())
        tests = sorted((ROOT / "tests" / "engine").glob("*.cpp"))
        build.compile((path for path in tests if flags_of(path)), own)
        build.compile((path for path in tests if not flags_of(path)), own, build.precompile("tests", TEST_HEADERS, own))
        program = folder / "engine_tests"
        build.link(program)
        print(program)


@functools.cache
def torch_version() -> str | None:
    """Of the torch that is built against; None where there is none.

    pip builds with the environment's own Python but, unless it is told otherwise, without its packages: its torch is
    found all the same, as one that pip fetched for the build would be another than the one in use.
    """
    if importlib.util.find_spec("torch") is None:
        site.addsitedir(sysconfig.get_path("purelib"))
        site.addsitedir(sysconfig.get_path("platlib"))
    try:
        return importlib.metadata.version("torch") if importlib.util.find_spec("torch") is not None else None
    except importlib.metadata.PackageNotFoundError:
        return None


def torch_minor() -> str | None:
    """The minor version, such as 2.13, that what is made is bound to: None for an sdist, which is for all of them, and
    where there is no torch."""
    if {"sdist", "egg_info"} & set(sys.argv) or torch_version() is None:
        return None
    return ".".join(torch_version().split(".")[:2])


def version() -> str:
    """The package's, and where it is built the torch that it is for."""
    own = re.search(r'__version__ = "(.+)"', (ROOT / "torch_mesh" / "version.py").read_text()).group(1)
    return f"{own}+torch{minor}" if (minor := torch_minor()) else own


def requirements() -> list[str]:
    """Those of requirements.txt; what is built runs with one minor version of torch alone."""
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    stated = [line for line in lines if line]
    if minor := torch_minor():
        return [f"torch=={minor}.*" if re.match(r"torch\b", line) else line for line in stated]
    return stated


setup(
    version=version(),
    install_requires=requirements(),
    packages=[*find_packages(include=["torch_mesh*"], exclude=["torch_mesh.ops"]), "torch_mesh.ops"],
    py_modules=["torch_mesh_autoload"],
    package_dir={"torch_mesh.ops": "ops"},
    package_data={"torch_mesh": ["py.typed", "_C.pyi", "statistics/page.html"]},
    ext_modules=[Extension(EXTENSIONS[0], sources=[])],
    cmdclass={"build_ext": BuildExtension, "engine_objects": EngineObjects, "engine_tests": EngineTests},
)
