"""Kernels of other projects, from their checkouts, compared with ours on the same shapes. None of their code is kept
here.

    git clone https://github.com/FutureMLS-Lab/OSCAR ; git clone https://github.com/zyqCSL/DiffKV
    python -m bench.rivals.decode --oscar OSCAR --diffkv DiffKV
"""
