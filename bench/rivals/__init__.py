"""Comparison with kernels of other projects on the same shapes. Their code comes from their checkouts.

    git clone https://github.com/FutureMLS-Lab/OSCAR ; git clone https://github.com/zyqCSL/DiffKV
    python -m bench.rivals.decode --oscar OSCAR --diffkv DiffKV
"""
