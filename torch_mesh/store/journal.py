"""The journal of an unfinished store: marks its folder, and lists what a second run can keep."""

from __future__ import annotations

import errno
import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_mesh.store.header import parse_json
from torch_mesh.store.manifest import OtherFile
from torch_mesh.system.atomic_files import FILE_MODE

JOURNAL_NAME = "journal.jsonl"
JOURNAL_START = b'{"plan":{"format_version":'


class Journal:
    """Lines of JSON: the plan, then finished records and files. A truncated last line is dropped."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self.records: dict[tuple[int, int], int] = {}
        self.files: dict[str, OtherFile] = {}
        self.resumed = False
        kept = self._load(path, identity)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, FILE_MODE)
        self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115  # open as long as the conversion
        self._file.truncate(kept)
        self._file.seek(kept)
        if not kept:
            self.store_id = secrets.token_bytes(16)
            self._append({"plan": identity, "store_id": self.store_id.hex()})

    def _load(self, path: Path, identity: dict[str, Any]) -> int:
        """The length of the beginning of ``path`` that is a journal of this plan."""
        try:
            lines = path.read_bytes().splitlines(keepends=True)
        except FileNotFoundError:
            return 0
        kept = 0
        for number, line in enumerate(lines):
            try:
                entry = parse_json(line)
                if not line.endswith(b"\n"):
                    break
                if number == 0:
                    if entry["plan"] != identity:
                        return 0
                    self.store_id = bytes.fromhex(entry["store_id"])
                    if len(self.store_id) != 16:
                        return 0
                elif "record" in entry:
                    layer, expert = entry["record"]
                    if layer not in range(identity["shape"]["layers"]) or expert not in range(
                        identity["shape"]["experts"]
                    ):
                        break
                    self.records[layer, expert] = int(entry["checksum"], 16)
                else:
                    self.files[entry["name"]] = OtherFile(**entry)
            except (ValueError, TypeError, KeyError):
                break
            kept += len(line)
        self.resumed = kept > 0
        return kept

    def add_record(self, layer: int, expert: int, checksum: int) -> None:
        self.records[layer, expert] = checksum
        self._append({"record": [layer, expert], "checksum": f"{checksum:016x}"})

    def add_file(self, file: OtherFile) -> None:
        self.files[file.name] = file
        self._append(asdict(file))

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file.name))
