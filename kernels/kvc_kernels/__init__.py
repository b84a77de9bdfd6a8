"""Tensor code of sglang_kvc: page layouts, the page store and the operations on it.

Imports torch and triton only, never sglang. Every operation has a plain-torch reference; `ops.py` pairs it with a
kernel of the same signature where there is one, and picks by device.

* `layout.py`: formats and pages; the only place that knows a byte offset.
* `store.py`: the page store.
* `common/`: quantization, bit packing, softmax weights, attention over dense rows, device dispatch, NVRTC.
* `append/`: new rows into the open bf16 blocks.
* `pages/`: allocation and release of pages, dense rows and tiers read back from them.
* `compact/`: packing and repacking of full blocks.
* `decode/`: decode attention and the snapshot of a step; `gluon/` has the Gluon kernel.
* `extend/`: attention of new tokens over a cached prefix; `cuda/` has the CUDA C++ kernel for Hopper.
* `scores/`: attention scores per cached token.
* `tiering/`: tokens to tiers, by importance, quota or threshold.
"""
