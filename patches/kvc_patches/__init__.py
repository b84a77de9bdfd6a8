"""Every hook into SGLang, one file per SGLang module touched, each with the signature that it relies on."""


def load() -> None:
    """Entry point of group `sglang.srt.plugins`: registers all hooks. SGLang calls it once in each process."""
