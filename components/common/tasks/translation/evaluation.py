"""A dataset's pairs, and the translations of many sentences with their progress."""

from collections.abc import Callable, Sequence

from components.common.contracts.errors import UserError
from components.common.contracts.manifests import Artifact, DatasetManifest
from components.common.tasks.translation.runners import BATCH_SIZE, Translator
from components.common.tasks.translation.sentences import translate_each

Pairs = Sequence[tuple[str, str]]
_AT_ONCE = 1024  # sentences of which those of similar length make a batch


def read_pairs(data: Artifact[DatasetManifest], split: str) -> Pairs:
    """Source and target of the pairs of a split, in their order."""
    (name,) = data.manifest.splits[split].shards  # type: ignore[index]
    lines = data.file(name).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    return [(source, target) for source, _, target in (line.partition("\t") for line in lines)]


def translate_all(
    translator: Translator,
    sentences: Sequence[str],
    progress: Callable[[int, int], None],
    *,
    beam_size: int = 1,
    batch_size: int = 0,
) -> list[str]:
    """Translations in order; `progress` is called with sentences done and in all, and 0 is the usual batch size.

    A sentence that is too long for the model, as others of another dataset may be, has an empty translation.

    Raises:
        UserError: all are.
    """
    found: list[str] = []
    refused: list[UserError] = []
    while len(found) < len(sentences):
        progress(len(found), len(sentences))
        part = sentences[len(found) : len(found) + _AT_ONCE]
        said = translate_each(translator, part, beam_size=beam_size, batch_size=batch_size or BATCH_SIZE)
        refused += [answer for answer in said if isinstance(answer, UserError)]
        found += [answer if isinstance(answer, str) else "" for answer in said]
    progress(len(sentences), len(sentences))
    if refused and len(refused) == len(sentences):
        raise UserError(f"no sentence can be translated; of the first: {refused[0]}", code=refused[0].code)
    return found
