"""Train a network that translates, on pairs of sentences, and end with a validated INT8 model.

enginery run pipelines/translation.py --data FILE
"""

from pipelines.resnet50 import whole_chain

translation = whole_chain(
    "translation",
    "Pairs of sentences -> INT8 model that translates, proved as accurate as the FP32 one.",
    task="translation",
    recipe={
        "architecture": "translation/transformer_base",
        "epochs": 30,
        "learning_rate": 0.0005,
        "train": {"optimizer": "adamw", "warmup_fraction": 0.2},
    },
)

if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
