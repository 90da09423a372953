"""Sentences in, translations out, by OpenVINO: the one model of a repository that translates."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb

from components.common.contracts.errors import UserError
from components.common.runtimes.selection import fit_model, not_measured_here
from components.common.tasks.translation.runners import ENCODER, OpenVinoNetwork, Translator
from components.common.tasks.translation.sentences import read_sentence
from components.common.tasks.translation.vocabulary import Vocabulary
from components.serve.admission_control import PendingRequests, refusal
from components.serve.repository_check import TEXT_TENSOR, TRANSLATION_TENSOR, open_from


class TritonPythonModel:
    """Called by Triton's Python backend, by one thread."""

    def initialize(self, args: dict[str, str]) -> None:
        """Check the repository and compile the network that is fit for this CPU."""
        repository = open_from(Path(args["model_repository"]))
        record = repository.manifest
        if note := not_measured_here(record.precision, record.measured_on):
            pb.Logger.log_warn(note)
        step = repository.file(fit_model(record.cpu_models).file if record.cpu_models else record.cpu_model)
        network = OpenVinoNetwork(step.with_stem(ENCODER.format(step.stem)), step)
        vocabulary = Vocabulary.read(repository.file(record.text_spec.vocabulary))
        self._translator = Translator(network, vocabulary, record.text_spec, [step])
        self._translator.translate(["a"])
        self._pending = PendingRequests([args["model_name"]], args["model_config"])

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """A response for each request; the sentences of all are translated together, those of similar length."""
        admitted, refused = self._pending.admit(requests)
        read = [self._read(request) for request in admitted]
        found = iter(self._translator.translate_tokens([ids for own in read if isinstance(own, list) for ids in own]))
        return [*(self._response(own, found) for own in read), *refused]

    def _read(self, request: Any) -> Any:
        """Tokens of a request's sentences, or its refusal."""
        given = pb.get_input_tensor_by_name(request, TEXT_TENSOR).as_numpy()  # [B, 1] bytes
        try:
            texts = [read_sentence(text, f"sentence {number}") for number, text in enumerate(given.flat, 1)]
            return self._translator.tokens(texts)
        except UserError as error:
            return refusal(str(error))

    def _response(self, read: Any, found: Iterator[str]) -> Any:
        if not isinstance(read, list):
            return read
        said = np.array([[next(found).encode()] for _ in read], dtype=object).reshape(-1, 1)
        return pb.InferenceResponse([pb.Tensor(TRANSLATION_TENSOR, said)])

    def finalize(self) -> None:
        """Free the model's memory."""
        self._translator.close()
