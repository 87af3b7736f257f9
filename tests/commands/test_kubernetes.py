"""``matrix --kubernetes``: Jobs that fit Kubernetes' schema, and whose commands run."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import Run, refused
from job_schema import check_job
from jsonschema import ValidationError
from s3_server import bucket, s3_server  # noqa: F401

from pipeline.commands.farm.kubernetes import kubernetes_job
from pipeline.commands.farm.matrix import DEFAULT_MEMORY, Job

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123


def test_jobs_of_kubernetes(cli: Run, bucket: str) -> None:  # noqa: F811
    store = f"s3://{bucket}/store"
    words = ("--gpu", "sm86", "--gpu", "8.9", "--target", "tensorrt-10", "--target", "rtx-1.7")
    code, output, _ = cli("matrix", *words, "--kubernetes", "some/image:1", "--store", store)
    assert code == 0
    jobs = list(yaml.safe_load_all(output))
    assert json.loads(cli("matrix", *words, "--kubernetes", "some/image:1", "--store", store,
                          "--json")[1]) == jobs  # fmt: skip
    assert len(jobs) == 4 * len(json.loads(cli("models", "--json")[1]))
    names = [job["metadata"]["name"] for job in jobs]
    assert len(set(names)) == len(names)
    assert all(LABEL.fullmatch(name) for name in names)
    by_words = {}
    for job in jobs:
        check_job(job)
        assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
        pod = job["spec"]["template"]["spec"]
        assert pod["restartPolicy"] == "Never"  # a Job may not have the default
        (container,) = pod["containers"]
        assert container["image"] == "some/image:1"
        assert container["resources"]["requests"] == {"cpu": "1", "memory": str(DEFAULT_MEMORY)}
        by_words[" ".join(container["command"])] = (pod, container)
    line = f"pipeline convert vit --target tensorrt-10 --store {store} --gpu sm89 --out /tmp/vit"
    pod, container = by_words[line]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert pod["nodeSelector"] == {
        "nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "9",
    }  # fmt: skip
    pod, container = by_words[line.replace("tensorrt-10", "rtx-1.7")]
    assert "limits" not in container["resources"] and "nodeSelector" not in pod


def test_another_job_has_another_name() -> None:
    """``kubectl apply`` cannot change a Job's pod template."""
    long = Job("a_model_with_a_name_that_is_longer_than_a_label_may_be_in_kubernetes", "rtx-1.7")
    for job in (Job("linear", "tensorrt-10", ("sm90",)), long):
        same, again, *others = (
            kubernetes_job(job, *rest)["metadata"]["name"]
            for rest in (
                ("image:1", "s3://a/b", 1), ("image:1", "s3://a/b", 1), ("image:2", "s3://a/b", 1),
                ("image:1", "s3://a/c", 1), ("image:1", "s3://a/b", 2),
            )
        )  # fmt: skip
        assert same == again and len({same, *others}) == 4
        assert len({name[:-8] for name in (same, *others)}) == 1
        assert all(LABEL.fullmatch(name) for name in (same, *others))


@pytest.mark.parametrize(
    ("place", "field", "value"),
    [
        ((), "apiVersion", "batch/v2"),
        (("metadata",), "labels", {"app": 1}),
        (("spec",), "backoffLimit", "3"),
        (("spec",), "retries", 3),
        (("spec",), "template", None),
        (("spec", "template", "spec"), "nodeSelector", {"nvidia.com/gpu.compute.major": 8}),
        (("spec", "template", "spec"), "containers", None),
        (("spec", "template", "spec", "containers", 0), "command", "pipeline convert linear"),
        (("spec", "template", "spec", "containers", 0), "resource", {}),
        (("spec", "template", "spec", "containers", 0, "resources"), "requests", ["cpu"]),
    ],
)
def test_the_schema_notices_a_wrong_job(place: tuple[Any, ...], field: str, value: Any) -> None:
    job = kubernetes_job(Job("linear", "tensorrt-10", ("sm90",)), "image", "s3://a/b", 1)
    check_job(job)
    wrong = part = copy.deepcopy(job)
    for name in place:
        part = part[name]
    part[field] = value
    if value is None:
        del part[field]
    with pytest.raises(ValidationError):
        check_job(wrong)


@pytest.mark.slow
def test_the_command_of_a_job_runs(cli: Run, bucket: str, tmp_path: Path) -> None:  # noqa: F811
    store = f"s3://{bucket}/store"
    job = kubernetes_job(Job("linear", "rtx-1.7", ("sm86",)), "image", store, 1)
    words = job["spec"]["template"]["spec"]["containers"][0]["command"]
    words[-1] = str(tmp_path / "linear")
    done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (entry,) = json.loads(cli("store", "ls", store, "--json")[1])["entries"]
    assert (entry["source"], entry["target"]) == ("linear", "rtx-1.7")


@pytest.mark.parametrize("store", [None, "/mnt/store", "memory://a", "file:///a"])
def test_a_job_needs_a_store_that_it_can_reach(cli: Run, store: str | None) -> None:
    words = ["--store", store] if store else []
    refused(cli("matrix", "--kubernetes", "image", *words), "Pass --store s3://BUCKET/PATH")
