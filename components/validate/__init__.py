"""Measure what each precision costs in accuracy and buys in speed, by the runtime that would serve it.

Reads:   a Bundle and the validation split of a Dataset.
Writes:  a Report: report.html for people, with the verdict; the same as model_card.md and report.json;
         accuracy.json, benchmark.json, predictions.npz, baseline_PRECISION.json, manifest.json.
Needs:   a GPU with TensorRT for engines; without one, OpenVINO runs FP32 and INT8 on the CPU.

Always finishes, whatever it measures: the gate step acts on the verdict.
"""
