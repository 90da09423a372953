"""Images with a mask each: a PNG file of the same name whose pixels are classes, or COCO's polygons."""

from dataclasses import replace

from components.common.contracts.errors import UserError
from components.common.data.places import is_uri, translate_errors
from components.common.tasks.segmentation import VOID
from components.preprocess.sources.annotations import composed, same_names, split_samples
from components.preprocess.sources.coco import coco
from components.preprocess.sources.folders import File, Tree, is_image_name, read_text, sample_of, shown
from components.preprocess.sources.samples import (
    ClassNames,
    Options,
    Sample,
    Source,
    Storage,
    check_two_classes,
    parse_class_names,
    split_of,
    with_refused,
)

WANTED = (
    "put the images into images/ and a PNG mask of the same name for each into masks/, or COCO JSON with polygons "
    "beside the images, in train/ and val/ or in one folder; export other formats as COCO JSON"
)
_NAMES = "classes.txt"
_BACKGROUND = "background"  # the class of what is no object of COCO's


def masks_source(tree: Tree, storage: Storage, options: Options) -> Source:
    """List the images of a tree that have masks, and split them.

    Raises:
        UserError: there are none, or the classes have no names.
    """
    files = {file.path: file for file in tree.files("")}
    images, masks = _by_key(files, "images"), _by_key(files, "masks")
    if not masks:
        with translate_errors(tree.name):
            found = coco(tree, files, with_outlines=True)
        if found is not None:
            classes = _with_background(found.classes)
            _check((options.names or classes).names, tree)
            return found.source(classes, tree.name, storage, options, files)
    if not images or not masks:
        raise UserError(f"{tree.name} has no masks; {WANTED}", code="no-masks", setting="data")
    names = _class_names(tree, files, options)
    annotation = str(len(names)).encode()  # one object for all samples
    samples: list[tuple[str, Sample]] = []
    refused: dict[str, str] = {}
    unused = [path for path in files if is_image_name(path) and {"images", "masks"}.isdisjoint(path.split("/"))]
    for key, own_images in images.items():
        own = masks.pop(key, [])
        if len(own_images) > 1:
            refused |= {file.path: f"{len(own_images)} images of one name, and so of one mask" for file in own_images}
        elif not own:
            name = key.rpartition("/")[2]
            refused[own_images[0].path] = f"it has no mask: none in masks/ is called {name}.png"
        elif len(own) > 1:
            refused[own_images[0].path] = "it has several masks: " + ", ".join(file.path for file in own)
        elif (split := split_of(key.rpartition("/")[0])) is not None:
            sample = replace(sample_of(own_images[0], 0), annotation=annotation, mask=sample_of(own[0], 0))
            samples.append((split, sample))
        else:
            unused.append(own_images[0].path)
    refused |= {file.path: "a mask of an image that is not there" for own in masks.values() for file in own}
    splits = split_samples(samples, options, refused)
    return with_refused(Source(classes=names, splits=splits, storage=storage, unused=tuple(unused)), refused)


def _by_key(files: dict[str, File], folder: str) -> dict[str, list[File]]:
    """Files below folders of a name, by what an image and its mask share: the rest of the path and the stem."""
    found: dict[str, list[File]] = {}
    for path, file in files.items():
        *folders, name = path.split("/")
        if folder in folders:
            place = len(folders) - 1 - folders[::-1].index(folder)
            key = "/".join([*folders[:place], *folders[place + 1 :], name.rpartition(".")[0] or name])
            found.setdefault(composed(key), []).append(file)
    return found


def _class_names(tree: Tree, files: dict[str, File], options: Options) -> tuple[str, ...]:
    """The classes in the order of their values. Raises UserError."""
    if options.names is not None:
        names = options.names.names
    else:
        paths = [path for path in files if path.rpartition("/")[2] == _NAMES]
        if not paths:
            raise UserError(
                f"{tree.name} does not name the classes of its masks; write {_NAMES} there, one class per line in the "
                "order of the values from 0 (the background is one), or set preprocess.class_names_file",
                code="no-class-names",
                setting="preprocess.class_names_file",
            )
        depth = min(path.count("/") for path in paths)
        found = {
            path: parse_class_names(read_text(tree, path), shown(tree.name, path), is_fetched=is_uri(tree.name)).names
            for path in sorted(paths)
            if path.count("/") == depth
        }
        names = same_names(found, tree.name)
    _check(names, tree)
    return names


def _with_background(classes: ClassNames) -> ClassNames:
    """COCO's categories behind a class for the rest of an image, which may be one of them."""
    known = [bare if (bare := name.strip("_")).lower() == _BACKGROUND else name for name in classes.names]  # labelme's
    first = next((name for name in known if name.lower() == _BACKGROUND), _BACKGROUND)
    names = (first, *(name for name in known if name != first))
    return ClassNames(names, {key: names.index(known[label]) for key, label in classes.labels.items()})


def _check(names: tuple[str, ...], tree: Tree) -> None:
    """Raises UserError: there are too few or too many classes."""
    check_two_classes(names, tree.name, "The background is a class of masks, too", is_fetched=is_uri(tree.name))
    if len(names) > VOID:
        raise UserError(
            f"{tree.name} has {len(names)} classes, and masks of 8 bits have at most {VOID}, since {VOID} is no class; "
            "leave some out",
            code="too-many-classes",
        )
