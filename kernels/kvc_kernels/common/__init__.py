"""Code that several operations share: quantization, bit packing, softmax weights, reference attention, NVRTC."""
