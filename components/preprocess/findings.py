"""What `ProblemFinder` finds, with evidence and a sentence for each kind."""

from typing import Literal

from pydantic import Field

from components.common.records import Record
from components.common.settings import how_to_set

SplitName = Literal["train", "val"]
SPLITS: tuple[SplitName, ...] = ("train", "val")
MAX_RATIO = 10.0  # of the largest class to the smallest
MAX_ASPECT = 5.0  # of the longer side to the shorter
_WORDS = {"train": "training", "val": "validation"}


class FoundImage(Record):
    """An image that was found to have a problem."""

    split: SplitName
    path: str = Field(description="As in the listing; what can't be printed is written as an escape such as \\udce9.")
    class_name: str
    height: int = Field(description="In pixels.")
    width: int = Field(description="In pixels.")


class FoundImages(Record):
    """Images with the same problem."""

    num_images: int
    examples: tuple[FoundImage, ...] = Field(description="At most 20, the worst first.")


class EqualImages(Record):
    """Images of one content."""

    num_images: int
    images: tuple[FoundImage, ...] = Field(description="At most 6; those of other splits and classes come with them.")


class SameContent(Record):
    """Contents that several images share."""

    num_contents: int
    num_train_images: int = Field(description="Training images that have one of these contents.")
    num_val_images: int = Field(description="Validation images that have one of these contents.")
    examples: tuple[EqualImages, ...] = Field(description="At most 20, those of most images first.")


class Imbalance(Record):
    """The largest and the smallest class of the training split that has images."""

    largest: str
    num_largest: int
    smallest: str
    num_smallest: int

    @property
    def ratio(self) -> float:
        """Images of the largest class for one of the smallest."""
        return self.num_largest / self.num_smallest

    @property
    def is_problem(self) -> bool:
        """Whether the ratio is above 10."""
        return self.ratio > MAX_RATIO


class EmptyClasses(Record):
    """Classes without an image in a split."""

    num_classes: int
    names: tuple[str, ...] = Field(description="At most 20 of them.")


class OddSizes(Record):
    """Images whose size is far from the others'.

    A shorter side is odd when it is both more than three interquartile ranges outside the quartiles of its logarithm
    (Tukey's outer fences) and more than a factor of four away from the median; quartiles and median are those of all
    images. The fences alone would flag harmless images of a set whose sizes hardly vary, the factor alone the ends of
    a set whose sizes vary much. Whatever the others are like, an image is odd whose longer side is more than five
    times its shorter one: the crop of the transform sees less than a fifth of it.
    """

    min_side: float = Field(description="Shorter sides below this are odd, in pixels.")
    max_side: float = Field(description="Shorter sides above this are odd, in pixels.")
    small: FoundImages
    large: FoundImages
    elongated: FoundImages


class SideHistogram(Record):
    """Images by their shorter side, over all splits; the bars are about equally wide on a logarithmic scale."""

    edges: tuple[int, ...] = Field(description="In pixels. Bar i holds the sides from edge i to below edge i + 1.")
    counts: tuple[int, ...]


class Problems(Record):
    """What was found, with evidence. An image can have several problems and then counts in each."""

    num_images: dict[SplitName, int]
    num_classes: int
    duplicates: dict[SplitName, SameContent] = Field(description="Contents that a split holds more than once.")
    leaks: SameContent = Field(description="Contents that are both in training and in validation.")
    conflicts: SameContent = Field(description="Contents with more than one label, in whichever split.")
    imbalance: Imbalance | None = Field(description="None where the training split holds no image.")
    empty_classes: dict[SplitName, EmptyClasses]
    odd_sizes: OddSizes | None = Field(description="None where there is no image.")

    def lines(self) -> list[str]:
        """One sentence for each problem: how many, an example, what to do. Empty where nothing was found."""
        lines = [self.duplicate_line(split) for split in SPLITS]
        lines += [self.leak_line(), self.conflict_line(), self.imbalance_line()]
        lines += [self.empty_line(split) for split in SPLITS]
        return [line for line in [*lines, self.size_line()] if line]

    def leak_message(self) -> str:
        """For the error that stops the step; empty where nothing leaks."""
        line = self.leak_line()
        how = how_to_set("preprocess", "on_leak", "warn")
        return line and f"{line}, or go on all the same with {how}; merge has this option, too"

    def duplicate_line(self, split: SplitName) -> str:
        """About copies within a split; empty where it has none."""
        found = self.duplicates[split]
        if not found.num_contents:
            return ""
        first, second, *_ = found.examples[0].images
        num_copies = found.num_train_images + found.num_val_images - found.num_contents
        where = "in every epoch" if split == "train" else "in the accuracy"
        are_copies = "is a copy of another" if num_copies == 1 else "are copies of others"
        return (
            f"{num_copies:,} of {self.num_images[split]:,} {_WORDS[split]} images {are_copies} there, such as "
            f"{second.path} of {first.path}. A copy counts once more {where}; remove the copies"
        )

    def leak_line(self) -> str:
        """About what is both in training and in validation; empty where nothing is."""
        if not self.leaks.num_contents:
            return ""
        train = next(image for image in self.leaks.examples[0].images if image.split == "train")
        val = next(image for image in self.leaks.examples[0].images if image.split == "val")
        num_leaks = self.leaks.num_val_images
        are_images = "is a training image" if num_leaks == 1 else "are training images"
        return (
            f"{num_leaks:,} of {self.num_images['val']:,} validation images {are_images} too, such as {val.path}, "
            f"which is the same file as {train.path} of the training split. The measured accuracy would be too high; "
            "remove what is in both from one of them"
        )

    def conflict_line(self) -> str:
        """About contents with several labels; empty where there are none."""
        found = self.conflicts
        if not found.num_contents:
            return ""
        first = found.examples[0].images[0]
        other = next(image for image in found.examples[0].images if image.class_name != first.class_name)
        num_images = found.num_train_images + found.num_val_images
        return (
            f"{num_images:,} images have the same content as one of another class, such as {first.path} "
            f"({first.class_name!r}) and {other.path} ({other.class_name!r}). A classifier gives one answer for both; "
            "keep each content in one class only"
        )

    def imbalance_line(self) -> str:
        """About uneven classes; empty where the largest has at most 10 times the images of the smallest."""
        found = self.imbalance
        if found is None or not found.is_problem:
            return ""
        return (
            f"the classes are uneven: {found.largest!r} has {found.ratio:,.1f} times as many training images as "
            f"{found.smallest!r} ({found.num_largest:,} and {found.num_smallest:,}). Small classes are learned worse, "
            "and top-1 hardly shows it; add images to them, and look at the report's accuracy by class"
        )

    def empty_line(self, split: SplitName) -> str:
        """About classes without an image; empty where every class has one."""
        found = self.empty_classes[split]
        if not found.num_classes:
            return ""
        effect = "The model can't learn them" if split == "train" else "Nothing tells how well they are recognized"
        return (
            f"the {_WORDS[split]} split has no image of {found.num_classes:,} of {self.num_classes:,} classes, such as "
            f"{found.names[0]!r}. {effect}; add images of them"
        )

    def size_line(self) -> str:
        """About odd sizes; empty where there are none."""
        sizes = self.odd_sizes
        if sizes is None:
            return ""
        kinds = (
            (sizes.small, f"a shorter side below {sizes.min_side:,.0f} px"),
            (sizes.large, f"a shorter side above {sizes.max_side:,.0f} px"),
            (sizes.elongated, f"a longer side of more than {MAX_ASPECT:g} times the shorter"),
        )
        found = [
            f"{images.num_images:,} {'has' if images.num_images == 1 else 'have'} {what}, such as "
            f"{images.examples[0].path} ({images.examples[0].width} x {images.examples[0].height})"
            for images, what in kinds
            if images.num_images
        ]
        advice = "Look whether they are what the others are, and remove thumbnails, banners and strips"
        return f"the size of some images is far from the others': {'; '.join(found)}. {advice}" if found else ""
