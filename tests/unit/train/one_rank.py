"""Rank 1 of test_equivalence's: `one_rank.py FOLDER SETTINGS`, in the environment that torchrun would make."""

import json
import sys
from pathlib import Path

from safetensors.torch import save_file

from components.train.distributed import find_world, joined

if __name__ == "__main__":
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    from tests.unit.train.test_equivalence import train

    with joined(world := find_world(), 60):
        weights, _ = train(world, **settings)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / f"rank-{world.rank}.safetensors"
    )
