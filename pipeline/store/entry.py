"""An entry of a store: one artifact, as the names of its blobs.

An entry's key is the key of the last stage, which counts everything that changes the result. Its
file is ``entries/MODEL/E-R-B-KEY.json``, with the first digits of the keys of the stages before it.
So one listing shows which entries share their first stages with a conversion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from pipeline.artifact.manifest import Manifest
from pipeline.errors import ArtifactError

SCHEMA = 1
ENTRIES, BLOBS = "entries", "blobs"
STAGES = ("export", "rewrite", "build", "compare")
_DIGITS = 16
_SHA256 = re.compile(r"[0-9a-f]{64}")
Parts = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Entry:
    """One artifact in a store.

    Args:
        manifest: The artifact's manifest. Its ``files`` name the blobs.
        parts: What each stage's key was made of, by stage; None if that is not known, because the
            artifact was pushed by itself.
    """

    manifest: Manifest
    parts: Parts | None = None

    @property
    def key(self) -> str:
        """The key of the last stage."""
        return self.manifest.keys[STAGES[-1]]

    @property
    def name(self) -> str:
        """The name of the entry's file."""
        *first, key = key_names(self.manifest.keys)
        return f"{folder_of(self.manifest.name)}/{'-'.join((*first, key))}.json"

    @property
    def blobs(self) -> dict[str, int]:
        """The sizes in bytes of the blobs by their hash."""
        return {info.sha256: info.bytes for info in self.manifest.files.values()}

    def to_json(self) -> bytes:
        """The content of the entry's file."""
        content = {
            "schema": SCHEMA,
            "blobs": self.blobs,
            "parts": self.parts,
            "manifest": json.loads(self.manifest.to_json()),
        }
        return json.dumps(content, indent=1).encode("ascii")

    @staticmethod
    def from_json(content: bytes, name: str) -> Entry:
        """Reads what `to_json` wrote.

        Args:
            content: The content of the file.
            name: The name of the file.

        Raises:
            ArtifactError: The content is damaged, is of another version of pipeline, or belongs to
                another name.
        """
        try:
            read = json.loads(content)
            manifest = Manifest.from_json(json.dumps(read["manifest"]), name)
            entry = Entry(manifest, _parts(read["parts"]))
            right = entry.name == name
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArtifactError(f"{name}: is not an entry of this version of pipeline") from error
        if not right:
            raise ArtifactError(f"{name}: its keys do not belong to its name")
        return entry


def _parts(read: object) -> Parts | None:
    if read is None:
        return None
    if not isinstance(read, dict) or not all(isinstance(part, dict) for part in read.values()):
        raise TypeError("the parts of a key are not objects by stage")
    return read


def blobs_in(content: bytes) -> dict[str, int] | None:
    """Returns the sizes of an entry's blobs by hash, whatever version wrote it; None if damaged."""
    try:
        found = json.loads(content)["blobs"]
        return {str(sha256): int(size) for sha256, size in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def blob_name(sha256: str) -> str:
    """Returns the name of a blob's file."""
    return f"{BLOBS}/{sha256[:2]}/{sha256}"


def is_blob(name: str) -> bool:
    """True if `name` is the name of a blob's file."""
    sha256 = name.rpartition("/")[2]
    return bool(_SHA256.fullmatch(sha256)) and name == blob_name(sha256)


def folder_of(model: str) -> str:
    """Returns the folder of all entries of a model."""
    return f"{ENTRIES}/{quote(model, safe='').replace('.', '%2E')}"


def key_names(keys: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the parts of an entry's name for the keys of its stages."""
    *first, last = (keys[stage] for stage in STAGES)
    return (*(key[:_DIGITS] for key in first), last)


def shared(name: str, keys: Mapping[str, str]) -> int:
    """Returns how many of the first stages an entry shares with a conversion, by its name."""
    there = name.rpartition("/")[2].removesuffix(".json").split("-")
    own = key_names(keys)
    count = 0
    while count < len(own) and there[count : count + 1] == [own[count]]:
        count += 1
    return count


def key_of(name: str) -> str:
    """Returns the key in the name of an entry's file."""
    return name.removesuffix(".json").rpartition("-")[2]
