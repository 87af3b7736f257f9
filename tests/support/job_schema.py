"""The JSON schema of a Kubernetes Job, ``batch/v1``: Kubernetes' own OpenAPI, every field known.

`job_schema.json` has what a Job needs of the strict schema in the package kubernetes-validate. That
has 72 MB (Apache-2.0). As a script, writes the file from the schema of one version of Kubernetes:

    pip download --no-deps kubernetes-validate==1.37.0 && unzip kubernetes_validate-*.whl
    python tests/support/job_schema.py \
        kubernetes_validate/kubernetes-json-schema/v1.37.0-local-strict/_definitions.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema

FILE = Path(__file__).with_suffix(".json")
JOB = "io.k8s.api.batch.v1.Job"


def check_job(job: object) -> None:
    """Raises `jsonschema.ValidationError` unless the object is a Job."""
    schema = json.loads(FILE.read_text(encoding="ascii"))
    jsonschema.Draft202012Validator({"$ref": f"#/$defs/{JOB}", **schema}).validate(job)


def needed(definitions: dict[str, Any]) -> dict[str, Any]:
    """Returns the definitions that a Job leads to, without their descriptions."""
    found: dict[str, Any] = {}
    left = [JOB]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = _bare(definitions[name])
            left += [reference.rpartition("/")[2] for reference in _references(found[name])]
    return dict(sorted(found.items()))


def _bare(value: Any, *, names: bool = False) -> Any:
    """A copy without texts. The keys of ``properties`` are names of fields, not of texts."""
    if isinstance(value, list):
        return [_bare(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _bare(item, names=key == "properties" and not names)
        for key, item in value.items()
        if names or (key != "description" and not key.startswith("x-kubernetes"))
    }


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _references(item)


def main(path: Path) -> None:
    found = needed(json.loads(path.read_text(encoding="utf-8"))["$defs"])
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in found.items())
    comment = json.dumps(f"made by {Path(__file__).name} from {path.parent.name}; Apache-2.0")
    FILE.write_text(f'{{"$comment": {comment}, "$defs": {{\n{lines}\n}}}}\n', encoding="ascii")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
