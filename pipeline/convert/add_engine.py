"""Adds an engine to an artifact: for another TensorRT or GPU, or in another precision.

The new engine gets a folder of its own, see `pipeline.artifact.engines`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace

from pipeline.artifact.artifact import Artifact, is_built
from pipeline.artifact.engines import engine_folder, outer_artifact
from pipeline.build.settings import BuildOptions
from pipeline.compare.plan import CompareOptions
from pipeline.convert.options import RewriteOptions
from pipeline.convert.recipe import Search
from pipeline.convert.report import Report
from pipeline.convert.reuse import check_not_replaced, drop_damaged, forget
from pipeline.convert.stages import BUILD, REWRITE
from pipeline.convert.workspace import Workspace
from pipeline.errors import InputError
from pipeline.machine.gpu import find_gpu
from pipeline.machine.progress import Announce
from pipeline.machine.swap_folder import carry, replacing
from pipeline.machine.target import Target
from pipeline.passes import DEFAULT_PASSES
from pipeline.spec.file_names import COMPARISON, ENGINES
from pipeline.spec.interface import Interface


def add_engine(
    artifact: Artifact, interface: Interface, options: BuildOptions, announce: Announce
) -> Report:
    """Builds an engine into its own folder in the artifact's ``engines``.

    For another target than the artifact's, exported.onnx is rewritten for that target first. An
    engine in the same folder is replaced. The artifact's own engine stays.

    Args:
        artifact: The artifact, opened without its built files.
        interface: The artifact's interface, with the profiles to build.
        options: The options of the build.
        announce: Called with the name of each stage.

    Returns:
        The report on the new engine.

    Raises:
        InputError: The artifact is an engine in another artifact. Or it was rewritten with the
            user's own passes, and the target is another one. Or another run replaced it.
        PipelineError: See `pipeline.convert.driver.run_build`.
    """
    own, target = artifact.manifest, options.target
    outer_place = outer_artifact(artifact.path)
    if outer_place is not None:
        raise InputError(f"{artifact.path}: is an engine of {outer_place}. Pass that artifact")
    skip = _skipped(artifact, target)
    gpu = find_gpu()
    here = () if target.flavour == "tensorrt_rtx" or isinstance(gpu, str) else (gpu.capability,)
    recipe = options.auto or options.recipe is not None
    name = engine_folder(target, options.gpus or here, options.precision, recipe, options.flags)
    place = artifact.path / ENGINES / name
    # the outer folder is replaced as a whole, so that nobody replaces it meanwhile
    with replacing(artifact.path, keep=True) as outer:
        check_not_replaced(outer, own, artifact.path)
        folder = outer / ENGINES / name
        if folder.exists():
            shutil.rmtree(folder)
        for file in own.files:
            of_reference = file.startswith(f"{COMPARISON}/") and (outer / file).is_file()
            if of_reference or not is_built(file):
                carry(outer / file, folder / file)
        for file in drop_damaged(folder, own):
            if file.startswith(COMPARISON):
                announce(f"left out {file}: the file was changed, damaged or missing")
        manifest = forget(folder, replace(own, interface=interface), after="rewrite")
        work = Workspace(folder, place, manifest, announce)
        if target.name != own.target.name:
            work.do(REWRITE, RewriteOptions(target=target, skip=skip, plugins=options.plugins))
        work.do(BUILD, Search(work.manifest, CompareOptions(), announce), options)
        keys = {name: key for name, key in own.keys.items() if name == "export"}
        return Report(place, work.finish(keys=keys), stage=BUILD.name)


def _skipped(artifact: Artifact, target: Target) -> tuple[str, ...]:
    """The passes that the user left out, which stay left out for another target."""
    passes = artifact.manifest.rewrite.passes if artifact.manifest.rewrite is not None else ()
    known = {one.name for one in DEFAULT_PASSES}
    foreign = [one.name for one in passes if one.name not in known]
    if foreign and target.name != artifact.manifest.target.name:
        raise InputError(
            f"{artifact.path}: was rewritten with your own pass {foreign[0]}, which is not in the "
            f"artifact. Convert again with --target {target} and another --out"
        )
    return tuple(one.name for one in passes if one.skipped)
