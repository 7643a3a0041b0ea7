"""One build serves every x86-64: AVX2 and AVX512 instructions are only in the translation units for them."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OBJECTS = sorted(REPOSITORY.glob("build/extension-*/csrc/**/*.o"))

# In 64-bit mode the bytes of ENCODINGS begin nothing else. Segment and address-size prefixes may come before them.
PREFIXES = frozenset({"26", "2e", "36", "3e", "64", "65", "67"})
ENCODINGS = {"62": "EVEX", "c4": "VEX", "c5": "VEX"}
INSTRUCTION = re.compile(r"^\s*[0-9a-f]+:\t((?:[0-9a-f]{2} )+)\s*\t(.+)$")

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="x86-64 instruction sets"),
    pytest.mark.skipif(not OBJECTS, reason="the extension's objects are not under build/; build it here to check them"),
    pytest.mark.skipif(
        not (shutil.which("objdump") and shutil.which("nm")), reason="needs objdump and nm (package binutils)"
    ),
]


def allowed_encodings(path: Path) -> set[str]:
    if path.parent.name != "kernels":
        return set()
    if path.stem.startswith("avx512") or path.stem == "amx":
        return {"VEX", "EVEX"}
    return {"VEX"} if path.stem in ("avx2", "avx_vnni") else set()


def instructions(path: Path) -> list[tuple[str, str]]:
    """Encoding and text of each instruction; the encoding is "" for one that every x86-64 has."""
    listing = subprocess.run(
        ["objdump", "--disassemble", "--wide", str(path)], capture_output=True, text=True, check=True
    ).stdout
    found = []
    for match in map(INSTRUCTION.match, listing.splitlines()):
        if match is None:
            continue
        opcode = next((byte for byte in match[1].split() if byte not in PREFIXES), "")
        found.append((ENCODINGS.get(opcode, ""), match[2]))
    return found


def name_of(path: Path) -> str:
    return path.relative_to(REPOSITORY / "build").as_posix()


def test_every_kernel_table_has_an_object() -> None:
    kernels = {path.stem for path in OBJECTS if path.parent.name == "kernels"}
    assert {"scalar", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"} <= kernels


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[] if allowed_encodings(path) else [pytest.mark.thorough]) for path in OBJECTS],
    ids=name_of,
)
def test_an_object_has_no_instructions_beyond_its_set(path: Path) -> None:
    code = instructions(path)
    assert code, "objdump's listing was not understood"
    allowed = allowed_encodings(path)
    foreign = [text for encoding, text in code if encoding and encoding not in allowed]
    assert not foreign, f"{len(foreign)} instructions, the first: {foreign[:5]}"
    # Without this the test would also pass if no encoding were recognized.
    assert allowed <= {encoding for encoding, _ in code}


@pytest.mark.parametrize("path", [path for path in OBJECTS if allowed_encodings(path)], ids=name_of)
def test_an_object_of_an_instruction_set_exports_only_its_tables(path: Path) -> None:
    """The linker could take an exported inline function in place of the copy in any other object."""
    command = ["nm", "--demangle", "--defined-only", "--extern-only", "--format=posix", str(path)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    symbols = [re.sub(r" \w [0-9a-f]+ ?[0-9a-f]*$", "", line) for line in listing.splitlines()]
    table = re.compile(r"torch_mesh::k(Avx|Amd|Zen4|Intel|Amx)\w*Table")
    assert symbols and all(table.fullmatch(symbol) for symbol in symbols), symbols
