"""A process of test_equivalence's: `one_rank.py FOLDER SETTINGS`, in the environment that torchrun would make."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from safetensors.torch import save_file

from components.train.distributed import find_world, joined

if __name__ == "__main__":
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    spec = spec_from_file_location("test_equivalence", Path(__file__).with_name("test_equivalence.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    world = find_world()
    with joined(world, 60):
        weights, measured = module.train(world, **settings)
    save_file(
        {name: tensor.contiguous() for name, tensor in weights.items()}, folder / f"rank-{world.rank}.safetensors"
    )
    if world.is_main:
        (folder / "measured.json").write_text(json.dumps(measured))
