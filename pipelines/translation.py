"""Train a network that translates, on pairs of sentences, and end with a validated INT8 model.

enginery run pipelines/translation.py --data FILE
"""

from pipelines.resnet50 import whole_chain

translation = whole_chain(
    "translation",
    "Pairs of sentences -> INT8 model that translates, proved as accurate as the FP32 one.",
    task="translation",
    default_architecture="translation/transformer_base",
)

if __name__ == "__main__":
    from enginery.cli.main import run_this

    run_this(__file__)
