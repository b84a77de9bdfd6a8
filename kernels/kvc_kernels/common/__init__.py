"""Code shared by several operations: format classes, quantization, bit packing, softmax weights, reference attention,
uploads, NVRTC.
"""
