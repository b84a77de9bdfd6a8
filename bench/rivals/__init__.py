"""Kernels of other projects, from checkouts of theirs, beside ours on the same shapes. Nothing of theirs is kept here.

    git clone https://github.com/FutureMLS-Lab/OSCAR ; git clone https://github.com/zyqCSL/DiffKV
    python -m bench.rivals.decode --oscar OSCAR --diffkv DiffKV
"""
