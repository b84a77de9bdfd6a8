"""A plug-in for test servers: ranks beyond the number of KV heads get copies of the heads, as on a GPU.

On a CPU, SGLang pads the heads of a model instead, and its weight loader pads only with its own CPU engine.
"""

ADJUST = "sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp"


def around_adjust(orig, model_config, load_config, tp_size):
    return model_config


def load():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(ADJUST, around_adjust, HookType.AROUND)
