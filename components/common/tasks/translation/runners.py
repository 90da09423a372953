"""Translators of sentences: encoder and step of a bundle in OpenVINO or TensorRT, in batches of similar length."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from components.common.contracts.environment import cpu_name, num_cores
from components.common.contracts.errors import RuntimeUnavailable, UserError
from components.common.contracts.manifests import Artifact, BundleManifest
from components.common.contracts.records import EngineEntry, Precision
from components.common.contracts.transforms import TextSpec
from components.common.runtimes import RuntimeOption
from components.common.runtimes.selection import choose_runtime, note_of_fallback
from components.common.tasks.translation.search import (
    ENCODER_OUTPUTS,
    STEP_INPUTS,
    Network,
    padded,
    search,
    state_shape,
)
from components.common.tasks.translation.vocabulary import Vocabulary

ENCODER = "{}_encoder"  # name of a precision's encoder in a bundle; the step has the precision's own
BATCH_SIZE = 32  # sentences
_ROOM = 8  # tokens by which a state gets larger
MAX_PIECE = 16  # characters that a token of SentencePiece stands for at most


def with_room(state: np.ndarray | None, sizes: Sequence[int | None], batch: int, position: int) -> np.ndarray:
    """The state of a step, None before the first, with room for a token at `position`: for a few more at a time.

    Processors attend to all of the room in each step, so that room for the longest translation would cost them most.
    """
    if state is not None and all(
        own > position for own, size in zip(state.shape[2:], sizes[2:], strict=True) if size is None
    ):
        return state
    wider = np.zeros(state_shape(sizes, batch, position + _ROOM), np.float32)
    if state is not None:
        wider[tuple(map(slice, state.shape))] = state
    return wider


def advanced(state: np.ndarray, found: np.ndarray, position: int) -> np.ndarray:
    """The state behind a step that returned `found`; one with room for tokens is written."""
    if state.shape == found.shape:
        return found
    state[:, :, :, position : position + 1] = found
    return state


class OpenVinoNetwork:
    """Encoder and step, each an ONNX file compiled for the CPU."""

    runtime = "openvino"

    def __init__(self, encoder: Path, step: Path) -> None:
        """Compile both."""
        from components.common.runtimes.openvino import LATENCY, compile_file

        self.device = f"{cpu_name()}, {num_cores()} cores"
        self._encoder = compile_file(encoder, LATENCY).create_infer_request()
        compiled = compile_file(step, LATENCY)
        self._step = compiled.create_infer_request()
        self._inputs = {name: port for port in compiled.inputs for name in port.get_names()}
        sizes = self._inputs["state"].get_partial_shape()
        self._state_sizes = [None if size.is_dynamic else size.get_length() for size in sizes]

    def encode(self, source: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """See Network."""
        found = self._encoder.infer({"source": source})
        memory, mask = (np.array(found[name]) for name in ENCODER_OUTPUTS)
        return memory, mask, with_room(None, self._state_sizes, len(source), 0)

    def step(
        self, tokens: np.ndarray, position: int, memory: np.ndarray, mask: np.ndarray, state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """See Network."""
        state = with_room(state, self._state_sizes, len(tokens), position)
        values = zip(STEP_INPUTS, (tokens, np.array([position]), memory, mask, state), strict=True)
        # An LSTM knows the position by its state.
        found = self._step.infer({name: value for name, value in values if name in self._inputs}, share_inputs=True)
        return found["logits"], advanced(state, np.array(found["next_state"]), position)


class Translator:
    """Translates by one network, whose encoder and step are in `files`; `note` is what else is to be said of it."""

    def __init__(
        self, network: Network, vocabulary: Vocabulary, text: TextSpec, files: Sequence[Path], note: str = ""
    ) -> None:
        self._network, self._vocabulary, self._text, self.files, self.note = network, vocabulary, text, files, note
        self.runtime, self.device = network.runtime, network.device

    def tokens(self, sentences: Sequence[str]) -> list[list[int]]:
        """Ids of each sentence with its end.

        Raises:
            UserError: one is longer than the model's sentences.
        """
        most = self._text.max_tokens
        for number, sentence in enumerate(sentences, 1):
            if len(sentence) > MAX_PIECE * most:  # before work is put into it
                raise UserError(
                    f"sentence {number} has {len(sentence):,} characters, and the model takes {most:,} tokens at most; "
                    "split it",
                    code="sentence-too-long",
                )
        ids = self._vocabulary.encode(sentences)
        for number, tokens in enumerate(ids, 1):
            if len(tokens) > most:
                raise UserError(
                    f"sentence {number} has {len(tokens):,} tokens, and the model takes {most:,} at most; split it",
                    code="sentence-too-long",
                )
        return ids

    def translate(self, sentences: Sequence[str], *, beam_size: int = 1, batch_size: int = BATCH_SIZE) -> list[str]:
        """Translate sentences of up to the model's number of tokens each. See translate_tokens.

        Raises:
            UserError: a sentence is too long.
        """
        return self.translate_tokens(self.tokens(sentences), beam_size=beam_size, batch_size=batch_size)

    def translate_tokens(
        self, ids: Sequence[Sequence[int]], *, beam_size: int = 1, batch_size: int = BATCH_SIZE
    ) -> list[str]:
        """Translations in order.

        Args:
            ids: of each sentence, as `tokens` has them.
            beam_size: candidates that the search keeps; 1 takes the likeliest token each time.
            batch_size: sentences that are translated together, those of similar length.
        """
        found: dict[int, list[int]] = {}
        for places in batches_by_length(ids, batch_size):
            source = padded([ids[place] for place in places])
            best = search(self._network, source, beam_size=beam_size, max_tokens=self._text.max_tokens)
            found.update(zip(places, best, strict=True))
        return self._vocabulary.decode([found[place] for place in range(len(ids))])

    def close(self) -> None:
        """Let go of the network."""
        del self._network


def batches_by_length(sentences: Sequence[Sequence[int]], batch_size: int) -> Iterator[list[int]]:
    """Places of sentences of similar length together, the longest first."""
    order = sorted(range(len(sentences)), key=lambda place: -len(sentences[place]))
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def open_translator(
    bundle: Artifact[BundleManifest], precision: Precision, option: RuntimeOption = "auto"
) -> Translator:
    """Open the translator of a precision for this machine: its plans where they run here, else OpenVINO on its files.

    Raises:
        RuntimeUnavailable: nothing here does, or not the runtime that `option` names.
        UserError: that runtime runs no translators.
    """
    models, text = bundle.manifest.models, bundle.manifest.text_spec
    runtime, unused = choose_runtime(bundle, option)
    names = ENCODER.format(precision), precision
    network: Network
    if runtime.runs_plans:
        files = [bundle.path / f"{name}.plan" for name in names]
        network = open_plans(files, bundle.manifest.engines, text.max_tokens)
    elif precision not in models or precision == "fp16":
        raise RuntimeUnavailable(f"no file of {precision.upper()} for CPUs", code="no-such-precision")
    elif option not in ("auto", OpenVinoNetwork.runtime):
        raise UserError(
            f"the runtime {option} runs no translators; set runtime to auto, tensorrt or openvino",
            code="unknown-runtime",
            setting="runtime",
        )
    else:
        files = [bundle.file(models[name]) for name in names]
        network = OpenVinoNetwork(*files)
    vocabulary = Vocabulary.read(bundle.file(text.vocabulary))
    return Translator(network, vocabulary, text, files, note_of_fallback(runtime, unused))


def open_plans(files: Sequence[Path], entries: Sequence[EngineEntry], max_tokens: int) -> Network:
    """Encoder and step as plans, which `entries` tell of.

    Raises:
        RuntimeUnavailable: TensorRT can't be used here, or there is no such plan.
    """
    import torch

    from components.common.runtimes.dynamic_plan import DynamicPlan
    from components.common.tasks.translation.gpu import GpuNetwork

    known = {entry.file: entry for entry in entries}
    if missing := [file.name for file in files if file.name not in known or not file.is_file()]:
        raise RuntimeUnavailable(f"the bundle has no {' and no '.join(missing)}", code="engine-missing")
    encoder, step = (DynamicPlan(file, known[file.name]) for file in files)
    return GpuNetwork(encoder, step, max_tokens=max_tokens, device=torch.device("cuda", torch.cuda.current_device()))
