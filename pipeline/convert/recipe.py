"""Decides on half precision before a build: by a search, by a given recipe, or by the rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.artifact.artifact import Artifact
from pipeline.artifact.manifest import Manifest
from pipeline.build.settings import BuildOptions
from pipeline.compare.half_search import search_artifact
from pipeline.compare.plan import CompareOptions
from pipeline.errors import ArtifactError, InputError
from pipeline.machine.files import fresh
from pipeline.machine.progress import Announce
from pipeline.rewrite.half import choices_in, loaded
from pipeline.spec.file_names import MODEL, RECIPE
from pipeline.spec.precision import AUTO, FOR_AUTO, Asked
from pipeline.spec.recipe import EVERYTHING, HalfInfo, Recipe, parse_recipe, read_recipe
from pipeline.spec.tensors import Precision

_HEAD = (
    "The nodes of {name} in half precision, and those that stay in float32.\n"
    "Edit this file, and apply it with: pipeline build ARTIFACT --recipe FILE"
)


@dataclass(frozen=True)
class Search:
    """What a search for a recipe needs, besides the options of the build.

    Args:
        manifest: The artifact's manifest, with the profiles to build.
        options: The sizes, the memory limit and the seed.
        announce: Called with each step that begins.
    """

    manifest: Manifest
    options: CompareOptions
    announce: Announce


def decided(
    folder: Path, options: BuildOptions, search: Search
) -> tuple[BuildOptions, HalfInfo | None]:
    """Searches for a recipe if the options ask for one, and writes the recipe to ``half.recipe``.

    Args:
        folder: The artifact's folder, with model.onnx.
        options: The options of the build.
        search: What a search needs.

    Returns:
        The options with the recipe, and what it does; None if there is no recipe.

    Raises:
        InputError: A line of the recipe matches no node.
        CompareError: The search failed.
    """
    recipe, info = options.recipe, None
    left_out: dict[str, str] = {}
    path = fresh(folder / RECIPE)
    if options.auto:
        found = search_artifact(
            folder, search.manifest, options.precision, search.options,
            lambda text: search.announce(f"search a recipe: {text}"),
        )  # fmt: skip
        recipe, info = found.recipe, found.info
    elif recipe is not None:
        choices = choices_in(loaded(folder / MODEL)[0], options.precision)[0]
        info, left_out = choices.info(recipe), choices.left_out(recipe)
        for pattern, text in left_out.items():
            search.announce(f"recipe: {pattern} = fp32 leaves {text}")
    if recipe is not None and info is not None:
        notes = {island.pattern: island.text for island in info.islands}
        for pattern, text in left_out.items():
            notes[pattern] = "\n".join(filter(None, (notes.get(pattern), f"leaves {text}")))
        head = f"{_HEAD.format(name=search.manifest.name)}\n{info.text}"
        if recipe.lines[0][0] == EVERYTHING:
            notes[EVERYTHING] = head
        path.write_text(recipe.text(notes), encoding="utf-8")
    return replace(options, recipe=recipe), info


def precision_and_recipe(
    artifact: Artifact, asked: Asked | None, recipe: Path | None
) -> tuple[Precision, Recipe | None]:
    """The precision and the recipe of a build.

    Args:
        artifact: The artifact. Its precision and its recipe are the default.
        asked: The precision; ``auto`` for a search.
        recipe: A recipe's file.

    Raises:
        InputError: The recipe states another precision, or is not valid.
    """
    if recipe is not None:
        found = read_recipe(recipe)
        if asked not in (None, found.precision):
            raise InputError(
                f"recipe {recipe}: states {found.precision}, not {asked}. Leave out --precision"
            )
        return found.precision, found
    if asked == AUTO:
        return FOR_AUTO, None
    manifest = artifact.manifest
    if asked is not None or RECIPE not in manifest.files:
        stated: Precision = manifest.precision  # type: ignore[assignment]
        return asked or stated, None
    path = artifact.path / RECIPE
    try:
        found = parse_recipe(artifact.read(RECIPE).decode("utf-8"), f"recipe {path}")
    except ArtifactError as error:
        raise ArtifactError(
            f"{path}: is missing or was changed. Apply a recipe with --recipe FILE, or pass "
            "--precision"
        ) from error
    return found.precision, found
