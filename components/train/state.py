"""All that training needs to go on as if it had never stopped: taken from a trainer, and given back to one."""

import base64
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from components.common.models import load_weights
from components.train.checkpointing import Saved
from components.train.distributed import to_main

if TYPE_CHECKING:
    from components.train.trainer import Trainer


def capture(trainer: "Trainer") -> Saved | None:
    """The state of all processes, on rank 0; None elsewhere. Between two steps, by all processes at once."""
    ranks = to_main(_own_state(trainer), trainer.world)
    if not trainer.world.is_main:
        return None
    tensors = {f"model/{name}": tensor for name, tensor in trainer.model.state_dict().items()}
    if trainer.ema is not None:
        tensors |= {f"ema/{name}": tensor for name, tensor in trainer.ema.module.state_dict().items()}
    optimizer = trainer.optimizer.state_dict()
    numbers = _split("optimizer", optimizer["state"], tensors)
    groups = _split("group", dict(enumerate(optimizer["param_groups"])), tensors)
    state = {
        "num_steps": trainer.num_steps_done,
        "history": [epoch.metrics() for epoch in trainer.history],
        "epoch_seconds": trainer.epoch_seconds(),
        "optimizer": {"groups": groups, "numbers": numbers},
        "schedule": {name: value for name, value in trainer.schedule.state_dict().items() if name != "lr_lambdas"},
        "scaler": trainer.scaler.state_dict(),
        "ranks": ranks,
    }
    return Saved(num_steps=trainer.num_steps_done, state=state, tensors=tensors)


def restore(trainer: "Trainer", saved: Saved) -> None:
    """Put a trainer where the one was that `capture` saw. Its loader has to be made with the state in there, too."""
    state = saved.state
    load_weights(trainer.model, saved.group("model"), "the checkpoint")
    if trainer.ema is not None:
        trainer.ema.module.load_state_dict(saved.group("ema"))
    _restore_optimizer(trainer.optimizer, saved)
    trainer.schedule.load_state_dict({**state["schedule"], "lr_lambdas": [None] * len(state["optimizer"]["groups"])})
    trainer.scaler.load_state_dict(state["scaler"])
    own = state["ranks"][trainer.world.rank]
    trainer.go_on(state["num_steps"], state["history"], state["epoch_seconds"], own["loss_sum"])
    _set_random_state(own["random"], trainer.world.device)


def loader_state(saved: Saved, rank: int) -> dict[str, Any]:
    """What a rank's training loader goes on from."""
    return saved.state["ranks"][rank]["loader"]


def _own_state(trainer: "Trainer") -> dict[str, Any]:
    """What differs from process to process."""
    return {
        "loader": trainer.train.state(),
        "loss_sum": trainer.loss_sum.item(),
        "random": _random_state(trainer.world.device),
    }


def _split(group: str, entries: dict[int, dict[str, Any]], tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What is no tensor of numbered entries; the rest goes to `tensors`, under the group's name."""
    others: dict[str, dict[str, Any]] = {}
    for index, values in entries.items():
        others[str(index)] = {name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}
        found = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        tensors |= {f"{group}/{index}/{name}": value for name, value in found.items()}
    return others


def _joined(others: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[int, dict[str, Any]]:
    """What `_split` took apart."""
    entries = {int(index): dict(values) for index, values in others.items()}
    for key, tensor in tensors.items():
        index, _, name = key.partition("/")
        entries.setdefault(int(index), {})[name] = tensor
    return entries


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: Saved) -> None:
    state = _joined(saved.state["optimizer"]["numbers"], saved.group("optimizer"))
    groups = _joined(saved.state["optimizer"]["groups"], saved.group("group"))
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state.items():
        for name, value in values.items():
            # A file has no memory layout; other strides than the parameter's would take other, slower kernels.
            if isinstance(value, torch.Tensor) and value.shape == parameters[index].shape:
                values[name] = torch.empty_like(parameters[index], dtype=value.dtype).copy_(value)
    optimizer.load_state_dict({"state": state, "param_groups": [groups[index] for index in sorted(groups)]})


def _random_state(device: torch.device) -> dict[str, Any]:
    """Of the four generators that a training process may draw from."""
    generator: dict[str, Any] = np.random.get_state(legacy=False)
    return {
        "python": random.getstate(),
        "numpy": {**generator, "state": {**generator["state"], "key": generator["state"]["key"].tolist()}},
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state(device)) if device.type == "cuda" else "",
    }


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    generator = state["numpy"]
    keys = np.array(generator["state"]["key"], np.uint32)
    np.random.set_state({**generator, "state": {**generator["state"], "key": keys}})
    torch.set_rng_state(_from_text(state["torch"]))
    if device.type == "cuda":
        torch.cuda.set_rng_state(_from_text(state["cuda"]), device)


def _to_text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
