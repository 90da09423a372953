"""Export a classifier to ONNX in FP32, typed FP16 and calibrated INT8, and to TensorRT engines where a GPU is.

Reads:   a Checkpoint, or a model file of the user's own (ONNX, or weights of a named architecture); and a Dataset,
         whose training split gives the calibration images.
Writes:  a Bundle: fp32.onnx, fp16.onnx, int8.onnx and int8_fp16.onnx for TensorRT, int8_cpu.onnx and
         int8_cpu_7bit.onnx for CPUs, scales.json, *.plan, manifest.json.
Needs:   a GPU and TensorRT for the engines; everything else runs on the CPU.
"""
