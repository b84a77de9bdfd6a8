"""Tensor code of sglang_kvc: page layouts, the page store and the operations on it.

Imports torch and triton only, never sglang. Every operation has a plain-torch reference; if there is also a kernel,
`ops.py` pairs the two and picks one by device.

* `formats.py`: storage formats. `layout.py`: pages; the only place with byte offsets.
* `store.py`: the page store.
* `common/`: quantization, bit packing, softmax weights, attention over dense rows, device dispatch, NVRTC.
* `append/`: writes new rows into open bf16 blocks.
* `pages/`: allocation and release of pages, dense rows and tiers read back from them.
* `compact/`: packing and repacking of full blocks.
* `records/`: blocks as bytes outside the pool, and back.
* `decode/`: decode attention and the snapshot of a step; `gluon/` has the Gluon kernel.
* `extend/`: attention of new tokens over a cached prefix; `cuda/` has the CUDA C++ kernel for Hopper.
* `scores/`: attention scores of cached tokens.
* `tiering/`: assignment of tokens to tiers, by importance, quota or threshold.
"""
